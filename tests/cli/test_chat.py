"""`millrace chat` from a pipe, as JSON, and in a terminal."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace
from tests.support.command_line import Result, environment

Talk = Callable[..., Result]
GREEDY = ("--temperature", "0", "--max-tokens", "10")


@pytest.fixture
def talk(millrace: Millrace, built_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """A chat whose stdin holds these lines."""

    def run_chat(lines: list[str], *flags: str) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{x}\n" for x in lines).encode())))
        return millrace("chat", built_tiny, *GREEDY, *flags)

    return run_chat


def test_a_line_a_message(talk: Talk) -> None:
    result = talk(["Hello!", "", "Tell me a story."])
    assert result.code == 0, result.err
    assert len(result.out.splitlines()) == 2 and result.err == ""


def test_the_conversation_goes_on_and_can_be_reset(talk: Talk) -> None:
    answers = [json.loads(x) for x in talk(["Hello!", "Hello!", "/reset", "Hello!"], "--json").out.splitlines()]
    first, second, third = (a["prefill"]["tokens"] for a in answers)
    assert first == third < second
    assert answers[0]["content"] == answers[2]["content"] and answers[0]["role"] == "assistant"


def test_commands(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    result = talk(["/help", "/hlep", "/system Be kind.", "Hello!", f"/save {file}", "/save", "/exit", "Hello!"])
    assert result.code == 0
    assert "/reset" in result.err and 'did you mean "/help"?' in result.err and "/save has no file" in result.err
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be kind." and messages[1]["content"] == "Hello!"
    assert len(result.out.splitlines()) == 1, "nothing is answered after /exit"


def test_a_message_that_is_too_long_is_refused_and_the_chat_goes_on(talk: Talk) -> None:
    result = talk(["word " * 3000, "Hello!"])
    assert result.code == 0
    assert "2048" in result.err and len(result.out.splitlines()) == 1


def test_a_folder_that_cannot_be_saved_to(talk: Talk) -> None:
    result = talk(["/save /no/such/folder/talk.json", "Hello!"])
    assert "cannot write /no/such/folder/talk.json" in result.err and result.out


def test_a_model_without_a_template(millrace: Millrace, tmp_path: Path) -> None:
    from millrace.runtime.open import BUNDLED

    folder = tmp_path / "plain"
    folder.mkdir()
    for file in (BUNDLED / "tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    millrace("chat", folder).assert_mistake("no chat template", "millrace generate")


def test_in_a_terminal_ctrl_c_stops_the_answer_and_twice_leaves(built_tiny: Path, cache: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "millrace", "chat", str(built_tiny), "--max-tokens", "1500", "--temperature", "1"]
    settings = {**environment(cache), "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, start_new_session=True
    )
    os.close(theirs)
    with process, killed_at_last(process):
        screen = Screen(ours)
        screen.until("/help for commands")
        os.write(ours, b"Tell me a story about a fox.\n")
        screen.until("\x1b[32m")  # the answer is green
        process.send_signal(2)
        screen.until("tokens", "> ")
        time.sleep(0.5)  # the prompt is shown a moment before a signal is looked for
        process.send_signal(2)
        screen.until("Ctrl-C again leaves", "> ")
        time.sleep(0.5)
        process.send_signal(2)
        assert process.wait(20) == 0
    os.close(ours)


@contextmanager
def killed_at_last(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


class Screen:
    """What the other side of a terminal shows."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._seen = descriptor, ""

    def until(self, *wanted: str) -> None:
        """Waits until these were shown, one after the other, since the last call."""
        until_s = time.monotonic() + 30
        for text in wanted:
            while text not in self._seen:
                assert time.monotonic() < until_s, f"{text!r} was not shown, but {self._seen!r}"
                if select.select([self._descriptor], [], [], 0.2)[0]:
                    self._seen += os.read(self._descriptor, 4096).decode(errors="replace")
            self._seen = self._seen.partition(text)[2]
