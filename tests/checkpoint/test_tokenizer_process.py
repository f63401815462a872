"""A tokenizer in a process of its own gives the same tokens, and is replaced when it dies."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import CheckpointError

TINY = BUNDLED / "tiny"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are held on Linux alone")
TEXTS = ["", "Pip has a red hat.", "é😀\n" * 500, "<|user|>Hi<|end|>", "word " * 20_000]


@pytest.fixture
def process() -> "TokenizerProcess":
    return TokenizerProcess(TINY)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_tokens_are_those_of_the_tokenizer(process: TokenizerProcess, add_special_tokens: bool) -> None:
    tokenizer = open_tokenizer(TINY)
    for text in TEXTS:
        assert list(process.encode(text, add_special_tokens)) == tokenizer.encode(text, add_special_tokens)
    process.close()


def test_threads_take_turns(process: TokenizerProcess) -> None:
    tokenizer = open_tokenizer(TINY)
    texts = [f"Number {i}. " * 100 for i in range(8)]
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda t=text: found.update({t: list(process.encode(t, True))})) for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: tokenizer.encode(text, True) for text in texts}
    process.close()


def test_a_killed_process_is_replaced(process: TokenizerProcess) -> None:
    expected = list(process.encode("Hello", True))
    assert process._worker.process is not None
    process._worker.process.process.kill()
    process._worker.process.process.wait()
    assert list(process.encode("Hello", True)) == expected
    process.close()


def test_one_that_takes_too_long_is_stopped() -> None:
    process = TokenizerProcess(TINY, timeout_s=0.001)
    with pytest.raises(CheckpointError, match="took too long"):
        process.encode("Hello", True)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ended"):
        TokenizerProcess(tmp_path).encode("Hello", True)


def test_what_becomes_of_the_folder_does_not_matter(tmp_path: Path) -> None:
    """Another tokenizer in its place, or none: all texts of a server are tokenised alike."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    process, expected = TokenizerProcess(folder), open_tokenizer(TINY).encode("Once upon a time", True)
    changed = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    a, b = [token for token, i in vocabulary.items() if i in expected[:2]]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    assert list(process.encode("Once upon a time", True)) == expected
    process.close()
    shutil.rmtree(folder)
    assert list(process.encode("Once upon a time", True)) == expected, "a new process, as after an abandoned text"
    process.close()


# ------------------------------------------------------------------ while somebody computes on all cores


def state(pid: int) -> str:
    """As proc(5) has it: R runs, S waits, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.002)


@pytest.fixture
def held(process: TokenizerProcess) -> Iterator[TokenizerProcess]:
    """Started, and held."""
    process.encode("Hello", True)
    process.hold(True)
    yield process
    process.close()


def pid_of(process: TokenizerProcess) -> int:
    assert process._worker.process is not None
    return process._worker.process.process.pid


@ON_LINUX
def test_a_held_process_works_on_nothing_and_goes_on_where_it_was(held: TokenizerProcess) -> None:
    """A text that comes while it is held waits; one under way stops, and goes on; again and again."""
    text, found = TEXTS[-1], list[list[int]]()
    expected = open_tokenizer(TINY).encode(text, True)
    thread = threading.Thread(target=lambda: found.append(list(held.encode(text, True))))
    thread.start()
    wait_until(lambda: state(pid_of(held)) == "T", "it was not stopped")
    time.sleep(0.1)
    assert not found
    while not found:
        held.hold(False)
        time.sleep(0.0005)
        held.hold(True)
    thread.join()
    assert found == [expected]
    wait_until(lambda: state(pid_of(held)) == "S", "it waits for the next text, and is not stopped for that")


@ON_LINUX
def test_what_is_held_long_is_not_held_again(held: TokenizerProcess) -> None:
    """Else texts would never be done beside steps that last long."""
    time.sleep(0.06)
    held.hold(False)
    held.hold(True)
    assert list(held.encode(TEXTS[-1], True)) == open_tokenizer(TINY).encode(TEXTS[-1], True)


@ON_LINUX
def test_a_stopped_process_is_late_and_ends_like_any_other() -> None:
    process = TokenizerProcess(TINY)
    process.encode("Hello", True)
    process.hold(True)
    process._timeout_s = 1
    with pytest.raises(CheckpointError, match="took too long"):
        process.encode("Hello", True)
    process.hold(False)
    process._timeout_s = 120
    assert list(process.encode("Hello", True)) == open_tokenizer(TINY).encode("Hello", True)
    process.close()


OWNER = """
import sys, threading, time
from pathlib import Path
from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess
process = TokenizerProcess(Path(sys.argv[1]))
process.encode("Hello", True)
process.hold(True)
threading.Thread(target=process.encode, args=("word " * 20_000, True), daemon=True).start()
print(process._worker.process.process.pid, flush=True)
time.sleep(60)
"""


@ON_LINUX
def test_a_stopped_process_ends_with_its_owner() -> None:
    """Also where that is killed, and cannot let it go on."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(TINY)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        wait_until(lambda: state(pid) == "T", "it was not stopped")
        owner.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "it is left behind")
