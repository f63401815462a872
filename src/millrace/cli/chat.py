"""`millrace chat`: a conversation in the terminal; also reads questions from a pipe."""

import json
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click

from millrace.cli.models import opened
from millrace.cli.options import json_option, made, settings_options
from millrace.cli.sampling import SamplingFlags
from millrace.cli.screen import decoded, note, size
from millrace.cli.stream import Answered, chat_ids, stream
from millrace.cli.tables import Tables
from millrace.env import Env
from millrace.errors import ConfigError, MillraceError, nearest
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open import BuildSettings, Opened, RunSettings
from millrace.runtime.params import FinishReason, SamplingParams

EPILOG = """\b
Examples:
  millrace chat tiny
  millrace chat ./llama-3.2-1b --system "Answer in one sentence." --temperature 0
  echo "Tell me a story." | millrace chat tiny"""
HELP = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message and forget the conversation; without TEXT: have none",
    "/save FILE": "write the conversation as JSON",
    "/exit": "leave; Ctrl-D and Ctrl-C twice do too",
}


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("--system", metavar="TEXT", help="The system message.")
@settings_options(SamplingFlags, BuildSettings, RunSettings)
@json_option
@click.pass_obj
def command(env: Env, /, model: str, system: str | None, as_json: bool, **given: Any) -> None:
    """Chat with MODEL in this terminal.

    /help lists the commands; Ctrl-C stops an answer, twice leaves. From a pipe every line is one message; --json
    prints every answer as one line of JSON.
    """
    params = made(SamplingFlags, given).params()
    with opened(model, made(BuildSettings, given), made(RunSettings, given), env) as model_opened:
        chat = Chat(model_opened, params, _screen(as_json), system)
        chat.check()
        chat.screen.welcome(model_opened)
        chat.run()


def message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


@dataclass
class Chat:
    """The conversation and its loop."""

    model: Opened
    params: SamplingParams
    screen: "Screen"
    system: str | None
    messages: list[dict[str, object]] = field(default_factory=list)
    _loop: EngineLoop = field(init=False)

    def __post_init__(self) -> None:
        self._loop = self.model.loop()

    def check(self) -> None:
        """Fails now, and not after the first message, where the model has no chat template."""
        chat_ids(self.model, [message("user", "Hi")])

    def run(self) -> None:
        while True:
            try:
                line = self.screen.read()
                if line is None:
                    return
                text = line.strip()
                if text == "/exit":
                    return
                if text.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except MillraceError as error:  # a mistake in one message; the conversation goes on
                self.screen.mistake(error)

    def _answer(self, text: str) -> None:
        """raises RequestError where the conversation has outgrown the context; then this message is not kept"""
        asked = [*self.messages, message("user", text)]
        ids = chat_ids(self.model, [*self._opening(), *asked])
        with _interruptible() as stopped:
            answered = stream(self._loop, ids, self.params, self.screen.part, stopped)
        self.messages = [*asked, message("assistant", answered.texts[0])]
        self.screen.answered(answered)
        answered.raise_error()

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        match name:
            case "/help":
                self.screen.say("\n".join(f"{key:14} {what}" for key, what in HELP.items()))
            case "/reset":
                self.messages = []
                self.screen.say("A new conversation.")
            case "/system":
                self.messages, self.system = [], rest.strip() or None
                self.screen.say(f"System message: {self.system}" if self.system else "No system message.")
            case "/save":
                self._save(rest.strip())
            case _:
                raise ConfigError(
                    f"there is no command {name}", nearest(name, [k.split()[0] for k in HELP]), "/help lists them"
                )

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save has no file", "/save FILE", "name the file to write")
        whole = {"messages": [*self._opening(), *self.messages]}
        try:
            Path(name).expanduser().write_text(json.dumps(whole, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write {name}: {error}", "a file in a folder that exists", "name another"
            ) from error
        self.screen.say(f"Saved {len(self.messages)} messages to {name}.")

    def _opening(self) -> list[dict[str, object]]:
        return [message("system", self.system)] if self.system else []


class Screen:
    """What a conversation looks like in a pipe: one message a line in, answers out."""

    def welcome(self, model: Opened) -> None:
        """Before the first message."""

    def read(self) -> str | None:
        """The next message; None at the end."""
        return decoded(sys.stdin.buffer.readline()) or None

    def part(self, text: str) -> None:
        click.echo(text, nl=False)

    def answered(self, answered: Answered) -> None:
        click.echo()

    def say(self, text: str) -> None:
        note(text)

    def mistake(self, error: MillraceError) -> None:
        note(f"error: {error}")


class JsonScreen(Screen):
    """Every answer as one line of JSON."""

    def part(self, text: str) -> None:
        """The whole answer comes at its end."""

    def answered(self, answered: Answered) -> None:
        click.echo(json.dumps({"role": "assistant", "content": answered.texts[0], **answered.as_dict()}))


class Terminal(Screen):
    """For people: colours, line editing, a word on how to leave."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._fresh = True
        self._left_once = False
        import readline  # line editing and history, for input()

        readline.set_auto_history(True)

    def welcome(self, model: Opened) -> None:
        precision, memory = Tables(model.engine).precision(), size(model.plan.total_bytes)
        self._console.print(
            f"[bold]{model.name}[/bold]  [dim]{precision}, {memory}; /help for commands, Ctrl-D leaves[/dim]"
        )

    def read(self) -> str | None:
        self._fresh = True
        while True:
            try:
                # \001 and \002 tell readline which characters take no room
                line = input("\n\001\033[1;36m\002> \001\033[0m\002")
                self._left_once = False
                return line
            except EOFError:
                self._console.print()
                return None
            except KeyboardInterrupt:
                if self._left_once:
                    return None
                self._left_once = True
                self._console.print("\n[dim]Ctrl-C again leaves[/dim]")

    def part(self, text: str) -> None:
        self._console.print(text.lstrip() if self._fresh else text, end="", markup=False, soft_wrap=True, style="green")
        self._fresh = False

    def answered(self, answered: Answered) -> None:
        n, seconds = answered.decode
        rate = f", {n / seconds:,.0f} tokens/s" if seconds > 0 else ""
        stopped = ", stopped" if answered.output.outputs[0].finish_reason == FinishReason.ABORT else ""
        self._console.print(f"\n[dim]{n + 1} tokens{rate}{stopped}[/dim]")

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def mistake(self, error: MillraceError) -> None:
        self._console.print(str(error), style="red", markup=False)


def _screen(as_json: bool) -> Screen:
    return JsonScreen() if as_json else Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Screen()


@contextmanager
def _interruptible() -> Any:
    """Ctrl-C asks the answer to stop at its next token; the second one leaves the chat."""
    interrupts = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        stopped: Callable[[], bool] = lambda: interrupts > 0  # noqa: E731
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
