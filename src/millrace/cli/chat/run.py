"""Runs `millrace chat`, whose options are in `options.py`: `--help` imports nothing else."""

import json
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from millrace.cli.chat.chat_screen import JsonScreen, Screen, Terminal
from millrace.cli.local_generation import chat_ids, stream
from millrace.cli.open_model import opened
from millrace.cli.options import make_settings
from millrace.cli.sampling_flags import SamplingFlags, as_options
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.errors import ConfigError, MillraceError, RequestError, close_matches, nearest
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import RunningModel
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.settings import RunSettings

HELP = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message and forget the conversation; none: have none; without TEXT: show it",
    "/save FILE": "write the conversation as JSON",
    "/exit": "leave; Ctrl-D and Ctrl-C twice do too",
    '"""': "begin a message of several lines, and end it; a \\ at the end of a line goes on, too",
}
LEAVE = ("/exit", "/quit", "/bye")  # the last two are other programs' names for it
# Other programs' commands, and what is meant here.
OTHER_COMMANDS = {
    "/set": "set when the chat starts: millrace chat MODEL --temperature 0, --max-tokens 64, --seed 7",
    "/clear": "called /reset here",
    "/load": "named when the chat starts: millrace chat MODEL",
}
NO_SYSTEM = ("none", '""', "''")
_NAMES = [key.split()[0] for key in HELP if key.startswith("/")]


def run(env: Env, /, model: str, system: str | None, as_json: bool, **options: Any) -> None:
    """Run `millrace chat`."""
    params = make_settings(SamplingFlags, options).params()
    build, run = make_settings(BuildSettings, options), make_settings(RunSettings, options)
    with opened(model, build, run, env, sequences=1, quiet=as_json) as model_opened:
        chat = Chat(model_opened, params, _screen(as_json, env.plain_terminal), system)
        chat.check()
        chat.screen.welcome(model_opened)
        chat.run()


def message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


@dataclass
class Chat:
    """A conversation and its input loop."""

    model: RunningModel
    params: SamplingParams
    screen: Screen
    system: str | None
    messages: list[dict[str, object]] = field(default_factory=list)
    _loop: EngineLoop = field(init=False)

    def __post_init__(self) -> None:
        self._loop = self.model.loop()

    def check(self) -> None:
        """Fail at once if the model has no chat template."""
        chat_ids(self.model, [message("user", "Hi")])

    def run(self) -> None:
        while True:
            try:
                line = self.screen.read()
                if line is None:
                    return
                text = line.strip()
                if text in LEAVE:
                    return
                if _is_command(text):
                    self._command(text)
                elif text:
                    self._answer(text)
            except MillraceError as error:  # a mistake in one message; the conversation goes on
                self.screen.mistake(error)

    def _answer(self, text: str) -> None:
        """Answer a message. raises RequestError if the conversation exceeds the context; the message is then dropped"""
        messages = [*self.messages, message("user", text)]
        ids = chat_ids(self.model, [*self._opening(), *messages])
        if self.messages and len(ids) >= self._loop.limits.max_context:
            raise RequestError(
                f"the conversation is full: with this message it has {len(ids)} tokens",
                f"less than {self._loop.limits.max_context}", "/reset begins a new one, /save FILE keeps this one",
            )  # fmt: skip
        with as_options(), _interruptible() as stopped:
            answered = stream(self._loop, ids, self.params, self.screen.part, stopped)
        self.messages = [*messages, message("assistant", answered.texts[0])]
        self.screen.show_timings(answered)
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
                self._set_system(rest.strip())
            case "/save":
                self._save(rest.strip())
            case _:
                what = f"this is {OTHER_COMMANDS[name]}" if name in OTHER_COMMANDS else nearest(name, _NAMES)
                raise ConfigError(f"there is no command {name}", what, "/help lists them")

    def _set_system(self, text: str) -> None:
        """Set the system message; without a text show it."""
        if text:
            self.messages, self.system = [], None if text in NO_SYSTEM else text
        now = f"System message: {self.system}" if self.system else "No system message."
        ends = "; /system none removes it, and forgets the conversation" if self.system and not text else ""
        self.screen.say(now + ends)

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save has no file", "/save FILE", "name the file to write")
        document = {"messages": [*self._opening(), *self.messages]}
        file = Path(name).expanduser()
        try:
            if file.exists() and not self.screen.confirm(f"{name} is already there. Overwrite it?"):
                raise ConfigError(f"{name} is already there", "a new file", "name another; nothing was written")
            file.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write {name}: {error}", "a file in a folder that exists", "name another"
            ) from error
        self.screen.say(f"Saved {len(self.messages)} messages to {name}.")

    def _opening(self) -> list[dict[str, object]]:
        return [message("system", self.system)] if self.system else []


def _screen(as_json: bool, plain: bool) -> Screen:
    return JsonScreen() if as_json else Terminal(plain) if sys.stdin.isatty() and sys.stdout.isatty() else Screen()


def _is_command(text: str) -> bool:
    """Whether a line is a command: a known or misspelt word after a slash, or a single word; `/etc/hosts is ...` is
    text."""
    if not text.startswith("/") or "\n" in text:
        return False
    name, *rest = text.split()
    alone = not rest and "/" not in name[1:]
    return alone or name in OTHER_COMMANDS or close_matches(name, _NAMES) is not None


@contextmanager
def _interruptible() -> Any:
    """Make Ctrl-C stop the answer at its next token; a second one leaves the chat."""
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
