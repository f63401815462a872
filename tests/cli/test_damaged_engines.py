"""A damaged engine is refused with what is wrong and how to fix it, whatever file was hit."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.compile.builder import build_engine
from millrace.compile.cache.engine_cache import EngineCache
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.manifest import FORMAT, Manifest, file_checksum, sealed
from tests.cli.conftest import Millrace

ASK = ("-p", "Once", "--max-tokens", "1")
FILES = ["weights.bin", "program.bin", "program.json", "graph.json", "tokenizer.json", "tokenizer_config.json",
         "config.json", "generation_config.json"]  # fmt: skip


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0x10
    file.write_bytes(data)


def test_the_list_of_files_is_complete(built_tiny: Path) -> None:
    assert sorted([*FILES, "manifest.json"]) == sorted(f.name for f in built_tiny.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit(millrace: Millrace, engine: Path, name: str) -> None:
    flip(engine / name)
    millrace("generate", engine, *ASK).assert_mistake(f"{name} is damaged", "build it again")


@pytest.mark.parametrize("name", FILES)
def test_a_shorter_file(millrace: Millrace, engine: Path, name: str) -> None:
    data = (engine / name).read_bytes()
    (engine / name).write_bytes(data[:-1])
    millrace("generate", engine, *ASK).assert_mistake(f"{name} has {len(data) - 1} bytes instead of {len(data)}")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(millrace: Millrace, engine: Path, name: str) -> None:
    (engine / name).unlink()
    millrace("generate", engine, *ASK).assert_mistake(f"{name} is missing")


def change(engine: Path, **values: Any) -> None:
    """As somebody would who knows how a manifest is sealed; of a table within it the fields that are given."""
    path = engine / "manifest.json"
    whole = json.loads(path.read_text())
    inner = {name: {**whole[name], **given} for name, given in values.items() if name == "cpu"}
    content = json.dumps({**whole, **values, **inner}).encode()
    with suppress(msgspec.DecodeError):
        content = msgspec.json.encode(sealed(msgspec.json.decode(content, type=Manifest)))
    path.write_bytes(content)


CACHE = {"layers": 5, "heads": 4, "key_size": 32, "value_size": 32, "format": "f32", "place": None}


def symbol(name: str, high: int = 8) -> dict[str, object]:
    return {"name": name, "low": 1, "usual": 1, "high": high}


@pytest.mark.parametrize(
    "values, fragment",
    [
        ({"format": 99}, "engine format 99"),
        ({"format": "1"}, "engine format 1"),
        ({"cpu": {"n_calls": "many"}}, "not readable"),
        ({"surprise": 1}, "surprise"),
        ({"max_context": -5}, "expected"),
        ({"symbols": []}, "without T, S and R"),
        ({"symbols": [symbol("T"), symbol("S", 0), symbol("R")]}, "not readable"),
        ({"symbols": [symbol("T"), symbol("S")]}, "without T, S and R"),
        ({"symbols": [symbol(str(i)) for i in range(9)]}, "not readable"),
        ({"vocab_size": 0}, "without a vocabulary"),
        ({"cpu": {"outputs": [{"name": "y", "shape": ["T", "Q"], "dtype": "f32", "offset": 0}]}}, "without bounds"),
        ({"cpu": {"activation_bytes": 64}}, "cannot run"),
        ({"cpu": {"n_calls": 2**50}}, "calls, but"),
        ({"cpu": {"weights_bytes": 64}}, "weights"),
        ({"cpu": {"caches": []}}, "cannot run"),
        ({"cpu": {"caches": [{**CACHE, "format": "int2"}]}}, "not readable"),
        ({"cpu": {"caches": [{**CACHE, "place": 0}]}}, "cannot run"),
        ({"files": {}}, "does not list"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "checksum": ""}}}, "outside the folder"),
    ],
)
def test_a_changed_manifest(millrace: Millrace, engine: Path, values: dict[str, Any], fragment: str) -> None:
    change(engine, **values)
    millrace("generate", engine, *ASK).assert_mistake(fragment)


@pytest.mark.parametrize("was, becomes", [('"vocab_size": 2048', '"vocab_size": 1024'), ("value_size", "valve_size")])
def test_an_edited_manifest(millrace: Millrace, engine: Path, was: str, becomes: str) -> None:
    path = engine / "manifest.json"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    millrace("generate", engine, *ASK).assert_mistake("manifest.json")


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b'{"format": %d}' % FORMAT])
def test_a_manifest_that_is_none(millrace: Millrace, engine: Path, content: bytes) -> None:
    (engine / "manifest.json").write_bytes(content)
    millrace("generate", engine, *ASK).assert_mistake("manifest.json")


@pytest.mark.parametrize("part", [[], ["--graph"], ["--calls"], ["--weights"], ["--memory"], ["--json"]])
def test_inspect_refuses_it_too(millrace: Millrace, engine: Path, part: list[str]) -> None:
    flip(engine / "program.json")
    millrace("inspect", engine, *part).assert_mistake("program.json is damaged")


@pytest.mark.parametrize("name", ["program.json", "graph.json"])
@pytest.mark.parametrize("text", [r"\u001b[2J", r"\t", r"\\\u202e", "\u202e", "\x9b"])
def test_names_that_would_steer_a_terminal(millrace: Millrace, engine: Path, name: str, text: str) -> None:
    path = engine / name
    path.write_text(path.read_text().replace("model.layers.1.", f"model.{text}.1."))
    files = json.loads((engine / "manifest.json").read_text())["files"]
    change(engine, files={**files, name: {"bytes": path.stat().st_size, "checksum": file_checksum(path)}})
    result = millrace("inspect", engine, "--graph" if name == "graph.json" else "--weights")
    result.assert_mistake(f"{name} holds control characters")
    assert result.err.replace("\n", "").isprintable()


@pytest.mark.parametrize("field", ["model_name", "architecture", "source"])
def test_a_manifest_with_names_that_would(millrace: Millrace, engine: Path, field: str) -> None:
    change(engine, **{field: "\x1b[2J"})
    result = millrace("inspect", engine)
    result.assert_mistake("not printable", r"\x1b[2J")
    assert result.err.replace("\n", "").isprintable()


def test_a_backslash_in_a_name_is_nothing_bad(millrace: Millrace, engine: Path) -> None:
    path = engine / "graph.json"
    path.write_text(path.read_text().replace("model.layers.1.", r"model.\\nlayers.1."))
    files = json.loads((engine / "manifest.json").read_text())["files"]
    change(engine, files={**files, path.name: {"bytes": path.stat().st_size, "checksum": file_checksum(path)}})
    assert millrace("inspect", engine, "--graph").code == 0


def test_a_damaged_engine_of_the_cache_says_how_to_be_rid_of_it(millrace: Millrace, cache: Path) -> None:
    def build(folder: Path) -> None:
        build_engine("tiny", BUNDLED / "tiny", folder, BuildSettings(tune=0))

    assert millrace("generate", "tiny", *ASK).code == 0
    entry = EngineCache(cache / "millrace").entries()[0]
    flip(entry.folder / "weights.bin")
    millrace("generate", "tiny", *ASK).assert_mistake("weights.bin is damaged", f"millrace rm {entry.name}")
    assert millrace("rm", entry.name).code == 0
    assert millrace("generate", "tiny", *ASK).code == 0
