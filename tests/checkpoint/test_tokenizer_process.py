"""A tokenizer in a process of its own gives the same tokens, and is replaced when it dies."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from millrace.checkpoint.tokenizer_files import open_tokenizer
from millrace.checkpoint.tokenizer_process import TokenizerProcess
from millrace.compile.find import BUNDLED
from millrace.errors import CheckpointError

TINY = BUNDLED / "tiny"
TEXTS = ["", "Pip has a red hat.", "é😀\n" * 500, "<|user|>Hi<|end|>", "word " * 20_000]


@pytest.fixture
def process() -> "TokenizerProcess":
    return TokenizerProcess(TINY)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_tokens_are_those_of_the_tokenizer(process: TokenizerProcess, add_special_tokens: bool) -> None:
    tokenizer = open_tokenizer(TINY)
    for text in TEXTS:
        assert process.encode(text, add_special_tokens) == tokenizer.encode(text, add_special_tokens)
    process.close()


def test_threads_take_turns(process: TokenizerProcess) -> None:
    tokenizer = open_tokenizer(TINY)
    texts = [f"Number {i}. " * 100 for i in range(8)]
    found: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda t=text: found.update({t: process.encode(t, True)})) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: tokenizer.encode(text, True) for text in texts}
    process.close()


def test_a_killed_process_is_replaced(process: TokenizerProcess) -> None:
    expected = process.encode("Hello", True)
    assert process._worker.process is not None
    process._worker.process.process.kill()
    process._worker.process.process.wait()
    assert process.encode("Hello", True) == expected
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
    assert process.encode("Once upon a time", True) == expected
    process.close()
    shutil.rmtree(folder)
    assert process.encode("Once upon a time", True) == expected, "a new process, as after an abandoned text"
    process.close()
