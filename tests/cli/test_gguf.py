"""A GGUF file wherever MODEL is accepted."""

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from millrace import LLM, SamplingParams
from tests.cli.conftest import Millrace
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf

ASK = ("-p", "the mill", "--max-tokens", "3", "--temperature", "0")
ANEW = (*ASK, "--tune", "0", "--no-evaluate")  # from a checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=4, **BLOCKY)


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "mill.Q4_0.gguf", folder, Kind.Q4_0)


def test_generate(millrace: Millrace, model: Path, folder: Path, tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", folder)
    asked = [json.loads(millrace("generate", m, *ANEW, "--json").out) for m in (plain, folder)]
    assert asked[0]["choices"] == asked[1]["choices"] and asked[0]["model"] == "plain"
    told = millrace("generate", model, *ANEW, "--chat")
    assert (
        told.code == 0 and "rounded again" not in told.err and "note: the embedding table, stored as Q4_0" in told.err
    )
    assert "note:" not in millrace("generate", model, *ANEW).err, "it was said when the engine was built"
    again = millrace("generate", model, *ANEW, "--precision", "w4a8", "--group", "128")
    assert "rounded again" in again.err and "groups of 128" in again.err
    assert millrace("inspect", model).out.startswith("mill.Q4_0 "), "by the file that was run"
    assert "rounded again" not in millrace("generate", model, *ANEW, "--precision", "w4a8").err
    assert "groups of 64" in millrace("generate", model, *ANEW, "--group", "64").err
    names = [e["name"].rsplit("-", 1)[0] for e in json.loads(millrace("list", "--json").out)]
    assert set(names) == {"mill.Q4_0", "plain", folder.name}


def test_chat(millrace: Millrace, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n")))
    told = millrace("chat", model, "--max-tokens", "2", "--json")
    assert told.code == 0 and json.loads(told.out)["role"] == "assistant"


def test_build_and_inspect(millrace: Millrace, folder: Path, tmp_path: Path) -> None:
    mixed = write_gguf(tmp_path / "m.gguf", folder, lambda n: Kind.Q6_K if n == "output.weight" else Kind.Q4_0)
    built = millrace("build", mixed, "-o", tmp_path / "m.engine")
    assert built.code == 0 and "Q6_K and kept exactly" in " ".join(built.out.split())
    shown = json.loads(millrace("inspect", tmp_path / "m.engine", "--json").out)
    assert shown["notes"] and shown["group"] == 32 and shown["precision"] == {"default": "w4a8", "lm_head": "w8a8"}
    assert millrace("generate", tmp_path / "m.engine", *ASK).code == 0


def test_pull_of_a_file_that_is_here(millrace: Millrace, model: Path) -> None:
    assert json.loads(millrace("pull", model, "--json").out)["bytes"] == model.stat().st_size


def test_python(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with LLM(model, precision={"default": "w4a8", "lm_head": "bf16"}) as llm:
        (output,) = llm.generate(["the mill"], SamplingParams(max_tokens=3, temperature=0))
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("no GGUF file",)),
        (b"GGUF\x03\x00\x00\x00", ("truncated", "download or copy the file again")),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), ("version 1", "convert the model again")),
    ],
)
@pytest.mark.parametrize("command", [("generate", *ASK), ("build", "-o", "x"), ("serve",), ("chat",)])
def test_damaged_files(
    millrace: Millrace, tmp_path: Path, command: tuple[str, ...], content: bytes, words: tuple[str, ...]
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    millrace(*command, tmp_path / "m.gguf").assert_mistake(*words)


def test_a_file_that_is_not_there(millrace: Millrace) -> None:
    millrace("generate", "./model.gguf", *ASK).assert_mistake("there is no file ./model.gguf", "check the spelling")
