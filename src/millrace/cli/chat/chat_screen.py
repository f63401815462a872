"""Input and output of a chat: through a pipe, as JSON, or in a terminal."""

import json
import select
import shutil
import sys

import click

from millrace.cli.console import decode_stdin, note, size
from millrace.cli.engine_tables import precision_text
from millrace.cli.local_generation import TimedGeneration
from millrace.cli.text_wrap import WordWrap
from millrace.errors import MillraceError
from millrace.runtime.open_engine import RunningModel
from millrace.runtime.request.sampling_params import FinishReason

QUOTES = '"""'
PASTED_S = 0.02  # lines that follow each other as quickly were pasted


class Screen:
    """A conversation through a pipe: one message per input line."""

    def welcome(self, model: RunningModel) -> None:
        """Before the first message."""

    def read(self) -> str | None:
        """Read the next message; None at the end. A trailing \\ or an opening triple quote continues it on the next
        line."""
        first = self.line()
        if first is None:
            return None
        if first.lstrip().startswith(QUOTES):
            return self._until_quotes(first.lstrip().removeprefix(QUOTES))
        lines = [first]
        while lines[-1].endswith("\\") and (more := self.line(more=True)) is not None:
            lines[-1:] = [lines[-1].removesuffix("\\"), more]
        return "\n".join(lines)

    def _until_quotes(self, opened: str) -> str:
        lines = [opened]
        while not lines[-1].rstrip().endswith(QUOTES) and (more := self.line(more=True)) is not None:
            lines.append(more)
        return "\n".join(lines).rstrip().removesuffix(QUOTES)

    def line(self, more: bool = False) -> str | None:
        """Read one line without its end; None at the end of the input. more: the line continues a message"""
        line = decode_stdin(sys.stdin.buffer.readline())
        return line.removesuffix("\n").removesuffix("\r") if line else None

    def confirm(self, question: str) -> bool:
        """Ask for confirmation; without a terminal the answer is no."""
        return False

    def part(self, text: str) -> None:
        click.echo(text, nl=False)

    def show_timings(self, answered: TimedGeneration) -> None:
        click.echo()

    def say(self, text: str) -> None:
        note(text)

    def mistake(self, error: MillraceError) -> None:
        note(f"error: {error}")


class JsonScreen(Screen):
    """A screen that prints every answer as one line of JSON."""

    def part(self, text: str) -> None:
        """The whole answer comes at its end."""

    def show_timings(self, answered: TimedGeneration) -> None:
        click.echo(json.dumps({"role": "assistant", "content": answered.texts[0], **answered.as_dict()}))


class Terminal(Screen):
    """A screen for a terminal: colours, line editing, word wrapping."""

    def __init__(self, plain: bool) -> None:
        """plain: no colours and no escape sequences of ours"""
        from rich.console import Console

        self._console = Console(highlight=False, color_system=None if plain else "auto")
        self._plain = plain
        self._fresh = True
        self._wrap = self._new_wrap()
        import readline  # line editing and history, for input()

        self._typed = readline.get_line_buffer
        readline.set_auto_history(True)
        # Bracketed, the lines of a pasted text arrive as one; it takes an escape sequence, and is readline's default.
        readline.parse_and_bind(f"set enable-bracketed-paste {'off' if plain else 'on'}")

    def welcome(self, model: RunningModel) -> None:
        precision, memory = precision_text(model.engine), size(model.plan.total_bytes)
        self._console.print(model.name, style="bold", end="", markup=False)
        self._console.print(f"  {precision}, {memory}", style="dim", markup=False)
        self._console.print("  /help for commands, Ctrl-D leaves", style="dim", markup=False)

    def read(self) -> str | None:
        self._fresh, self._wrap = True, self._new_wrap()
        left_once = False
        while True:
            try:
                return super().read()
            except KeyboardInterrupt:
                if left_once and not self._typed():
                    return None
                left_once = True
                self.say("\nCtrl-C again leaves")

    def line(self, more: bool = False) -> str | None:
        prompt = ". " if more else "> "
        # \001 and \002 tell readline which characters take no room
        shown = prompt if self._plain else f"\001\033[1;36m\002{prompt}\001\033[0m\002"
        try:
            lines = [input(shown if more else "\n" + shown)]
            while select.select([sys.stdin], [], [], PASTED_S)[0]:  # a terminal that does not say what is pasted
                lines.append(input())
        except EOFError:
            self._console.print()
            return None
        return "\n".join(lines)

    def confirm(self, question: str) -> bool:
        return click.confirm(question)

    def part(self, text: str) -> None:
        self._show(self._wrap.push(text.lstrip() if self._fresh else text))
        self._fresh = self._fresh and not text.strip()

    def show_timings(self, answered: TimedGeneration) -> None:
        self._show(self._wrap.flush())
        n, seconds = answered.decode
        rate = f", {n / seconds:,.0f} tokens/s" if seconds > 0 else ""
        stopped = ", stopped" if answered.output.outputs[0].finish_reason == FinishReason.ABORT else ""
        self.say(f"\n{n + 1} tokens{rate}{stopped}")

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def mistake(self, error: MillraceError) -> None:
        self._console.print(str(error), style="red", markup=False)

    def _show(self, text: str) -> None:
        if text:
            self._console.print(text, end="", markup=False, soft_wrap=True, style="green")

    def _new_wrap(self) -> WordWrap:
        return WordWrap(lambda: shutil.get_terminal_size().columns)
