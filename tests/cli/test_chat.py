"""`millrace chat` from a pipe, as JSON, and in a terminal."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.artifact.engine import Engine
from tests.cli.conftest import Millrace
from tests.support.command_line import Result, environment, heard, run_process

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


def test_a_system_message_is_shown_before_it_is_lost(talk: Talk, tmp_path: Path) -> None:
    """`/system` alone asks what it is; it takes a word to remove it, and the conversation with it."""
    first, second, third = (tmp_path / f"{i}.json" for i in range(3))
    result = talk(
        ["/system", "Hello!", "/system", f"/save {first}", "/system none", f"/save {second}", "/system",
         '/system ""', "/system Be kind.", f"/save {third}"],
        "--system", "Be brief.",
    )  # fmt: skip
    assert result.err.count("System message: Be brief.; /system none removes it") == 2
    assert result.err.count("No system message.") == 3 and "System message: Be kind.\n" in result.err
    saved = [[m["content"] for m in json.loads(f.read_text())["messages"]] for f in (first, second, third)]
    assert saved[0][:2] == ["Be brief.", "Hello!"] and saved[1:] == [[], ["Be kind."]]


def test_a_chat_takes_memory_for_one_sequence(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else will ask it anything. Who says how much gets that."""
    from millrace.cli.chat import run as chat
    from millrace.cli.main import run

    taken: list[int] = []
    monkeypatch.setattr(chat.Chat, "run", lambda self: taken.append(self.model.plan.n_pages))
    pages = Engine.open(engine).pages_per_sequence
    for flags in ((), ("--kv-memory", "64M")):
        assert run(["chat", str(engine), *flags]) == 0
    page_bytes = Engine.open(engine).page_bytes
    assert taken == [pages, (64 << 20) // page_bytes] and pages < taken[1]


def test_a_message_of_several_lines(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "one \\",
        "two",
        '"""three',
        "",
        '  four"""',
        '"""',
        "five",
        '"""',
        "last \\",
    ]
    assert talk([*lines[:-1], f"/save {file}"]).code == 0
    told = [m["content"] for m in json.loads(file.read_text())["messages"] if m["role"] == "user"]
    assert told == ["one \ntwo", "three\n\n  four", "five"]
    assert talk(lines[-1:]).code == 0, "the input may end in the middle of a message"


def test_a_path_is_text_and_a_misspelt_command_is_not(talk: Talk) -> None:
    result = talk(["/etc/hosts is a file, is it not?", "/rest", "/ what is this?", "/settle down, please"])
    assert len(result.out.splitlines()) == 3 and 'did you mean "/reset"?' in result.err


def test_a_file_that_is_there_is_not_overwritten_unasked(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("mine")
    assert "already there" in talk(["Hello!", f"/save {file}"]).err and file.read_text() == "mine"


def test_a_message_that_is_too_long_is_refused_and_the_chat_goes_on(talk: Talk) -> None:
    result = talk(["word " * 3000, "Hello!"])
    assert result.code == 0
    assert "2048" in result.err and len(result.out.splitlines()) == 1


def test_a_full_conversation_says_how_to_go_on(talk: Talk) -> None:
    result = talk(["word " * 900, "word " * 900, "word " * 900, "/reset", "Hello!"])
    assert "the conversation is full" in result.err and "/reset begins a new one" in result.err
    assert result.out.splitlines()[-1], "and then it goes on"


def test_other_programs_words_for_leaving(talk: Talk) -> None:
    for word in ("/bye", "/quit"):
        assert talk([word, "Hello!"]).out == ""
    assert "there is no command /clear" in talk(["/clear"]).err
    told = talk(["/set temperature 0", "/clear", "/reset", "Hello!"]).err
    assert "millrace chat MODEL --temperature 0" in told and "called /reset here" in told
    assert "did you mean" not in told, "/set is no misspelt /reset"


def test_a_folder_that_cannot_be_saved_to(talk: Talk) -> None:
    result = talk(["/save /no/such/folder/talk.json", "Hello!"])
    assert "cannot write /no/such/folder/talk.json" in result.err and result.out


def test_a_model_without_a_template(millrace: Millrace, tmp_path: Path) -> None:
    from millrace.compile.resolve_model import BUNDLED

    folder = tmp_path / "plain"
    folder.mkdir()
    for file in (BUNDLED / "tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    millrace("chat", folder, "--tune", "0").assert_mistake("no chat template", "millrace generate")


def test_in_a_terminal_ctrl_c_stops_the_answer_and_twice_leaves(built_tiny: Path, cache: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "millrace", "chat", str(built_tiny), "--max-tokens", "1500", "--temperature", "1"]
    settings = {**environment(cache), "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, start_new_session=True, preexec_fn=heard
    )
    os.close(theirs)
    with process, killed_at_last(process):
        screen = Screen(ours, process)
        screen.until("/help for commands")
        screen.type("Tell me a story about a fox.\n")
        screen.until("\x1b[32m")  # the answer is green
        process.send_signal(signal.SIGINT)
        screen.until("tokens", "> ")
        screen.interrupt()
        screen.until("Ctrl-C again leaves", "> ")
        screen.interrupt()
        assert process.wait(20) == 0
    os.close(ours)


@contextmanager
def in_a_terminal(engine: Path, cache: Path, columns: int = 80, **variables: Any) -> Iterator["Screen"]:
    """A chat on a terminal of its own, at its first prompt."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-m", "millrace", "chat", str(engine), "--max-tokens", "60", "--seed", "1"]
    settings = {**environment(cache), "TERM": "xterm", **variables}
    settings.pop("COLUMNS", None)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, start_new_session=True, preexec_fn=heard
    )
    os.close(theirs)
    with process, killed_at_last(process):
        screen = Screen(ours, process)
        screen.until("leaves", "> ")
        yield screen
    os.close(ours)


@pytest.mark.parametrize("brackets", [("\x1b[200~", "\x1b[201~"), ("", "")])
def test_what_is_pasted_is_one_message(
    built_tiny: Path, cache: Path, tmp_path: Path, brackets: tuple[str, str]
) -> None:
    """With the terminal's marks around it, and from one that sends none."""
    file = tmp_path / "talk.json"
    with in_a_terminal(built_tiny, cache) as screen:
        screen.type(f"{brackets[0]}Hello!\nTell me\na story.{brackets[1]}\n")
        screen.until("tokens", "> ")
        screen.type(f"/save {file}\n")
        screen.until("Saved 2 messages")
    assert json.loads(file.read_text())["messages"][0]["content"] == "Hello!\nTell me\na story."


def test_saving_over_a_file_is_asked(built_tiny: Path, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("mine")
    with in_a_terminal(built_tiny, cache) as screen:
        screen.type(f"/save {file}\n")
        screen.until("Overwrite it?")
        screen.type("n\n")
        screen.until("nothing was written", "> ")
        assert file.read_text() == "mine"
        screen.type(f"/save {file}\n")
        screen.until("Overwrite it?")
        screen.type("y\n")
        screen.until("Saved 0 messages")
    assert json.loads(file.read_text()) == {"messages": []}


def test_typing_takes_back_the_first_ctrl_c(built_tiny: Path, cache: Path) -> None:
    with in_a_terminal(built_tiny, cache) as screen:
        screen.interrupt()
        screen.until("Ctrl-C again leaves", "> ")
        screen.type("something")
        screen.until("something")
        screen.interrupt()
        screen.until("Ctrl-C again leaves", "> ")
        screen.interrupt()
        assert screen.process.wait(20) == 0


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_chat_without_colours(built_tiny: Path, cache: Path, variables: dict[str, str]) -> None:
    with in_a_terminal(built_tiny, cache, 80, **variables) as screen:
        screen.type("Tell me a story.\n")
        screen.until("tokens", "> ")
        assert not re.search("\x1b\\[[0-9;]*3[0-9]", screen.all), "no colours"
        assert "TERM" not in variables or "\x1b" not in screen.all


def test_words_are_not_broken_at_the_edge(built_tiny: Path, cache: Path) -> None:
    with in_a_terminal(built_tiny, cache, columns=20, NO_COLOR="1") as screen:
        screen.type("Tell me a story.\n")
        screen.until("tokens", "> ")
    plain = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", screen.all).replace("\r", "")
    answer = plain.split("Tell me a story.\n")[1].split(" tokens")[0].splitlines()[:-1]
    assert len(answer) > 3 and all(len(line.rstrip()) <= 20 for line in answer), answer
    whole = run_process(
        ["generate", str(built_tiny), "--chat", "Tell me a story.", "--max-tokens", "60", "--seed", "1"], cache
    )
    assert " ".join(answer).split() == whole.out.split(), "the same words"


@contextmanager
def killed_at_last(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


class Screen:
    """What the other side of a terminal shows."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor, self._seen = descriptor, ""
        self.process, self.all = process, ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        """The prompt is shown a moment before a signal is looked for: waits until it sleeps, and goes on sleeping."""
        until_s, before, n_same = time.monotonic() + 60, "", 0
        while time.monotonic() < until_s and n_same < 5:  # on a busy machine it also sleeps on its way there
            now = self._main_thread()
            n_same = n_same + 1 if now == before and "sleeping" in now else 0
            before = now
            time.sleep(0.05)
        self.process.send_signal(signal.SIGINT)

    def _main_thread(self) -> str:
        """Its state, and how often it gave up its core."""
        status = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/status").read_text()
        return "".join(line for line in status.splitlines() if line.startswith(("State", "voluntary")))

    def until(self, *wanted: str) -> None:
        """Waits until these were shown, one after the other, since the last call."""
        until_s = time.monotonic() + 90
        for text in wanted:
            while text not in self._seen:
                assert time.monotonic() < until_s, f"{text!r} was not shown, but {self._seen!r}"
                if select.select([self._descriptor], [], [], 0.2)[0]:
                    part = os.read(self._descriptor, 4096).decode(errors="replace")
                    self._seen, self.all = self._seen + part, self.all + part
            self._seen = self._seen.partition(text)[2]
