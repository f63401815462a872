"""Every mistake gets one clear message and exit code 2."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace

ASK = ("-p", "Once", "--max-tokens", "1")


@pytest.mark.parametrize("command", [("generate", *ASK), ("serve",), ("chat",), ("build", "-o", "x"), ("inspect",)])
def test_a_model_that_is_not_there(millrace: Millrace, command: tuple[str, ...]) -> None:
    millrace(*command, "no-such-model").assert_mistake("no-such-model", "check the spelling")


def test_a_folder_that_is_neither(millrace: Millrace, tmp_path: Path) -> None:
    millrace("generate", tmp_path, *ASK).assert_mistake("config.json")
    millrace("inspect", tmp_path).assert_mistake("has no manifest.json", "millrace build")


def test_a_file_instead_of_a_folder(millrace: Millrace, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    millrace("generate", file, *ASK).assert_mistake("is a file", "name the folder")


def test_a_hub_id_without_a_network(millrace: Millrace) -> None:
    millrace("pull", "org/name").assert_mistake("org/name", "HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    "flags, fragments",
    [
        (["--precision", "fp7"], ['precision "fp7" is unknown', "w4a8"]),
        (["--precision", "W4A8"], ['"W4A8" is unknown']),
        (["--group", "6", "--precision", "w8a8"], ["multiple of 4"]),
        (["--max-context", "100000"], ["100000", "2048"]),
        (["--max-context", "0"], ["--max-context is 0", "at least 1"]),
        (["--max-batch", "5000"], ["--max-batch is 5000", "1 to 1024"]),
        (["--isa", "sse2"], ['--isa is "sse2"', "avx512, avx2, scalar"]),
        (["--threads", "0"], ["--threads is 0", "1 to 1024"]),
        (["--kv-memory", "lots"], ['--kv-memory is "lots"', "512M"]),
        (["--kv-tier-size", "1G"], ["--kv-tier-size is given, and --kv-tier is not", "name it with --kv-tier"]),
        (["--kv-memory", "64K"], ["--kv-memory 64 KiB"]),
        (["--kv-memory", "1k"], ["--kv-memory 1 KiB"]),
        (["--max-tokens", "5000"], ["--max-tokens of 5000", "ask for --max-tokens of at most"]),
        (["--temperature", "nan"], ["--temperature is nan", "change --temperature"]),
        (["--temperature", "-1"], ["--temperature is -1", "change --temperature"]),
        (["--top-p", "0"], ["--top-p is 0", "change --top-p"]),
        (["--max-tokens", "0"], ["--max-tokens is 0", "change --max-tokens"]),
        (["--max-tokens", "-1"], ["--max-tokens is -1"]),
        (["-n", "0"], ["n is 0"]),
        (["--seed", str(2**70)], ["--seed is"]),
    ],
)
def test_a_flag_out_of_range(millrace: Millrace, flags: list[str], fragments: list[str]) -> None:
    millrace("generate", "tiny", "-p", "Once", *flags).assert_mistake(*fragments)


def test_too_little_kv_memory_names_what_would_fit(millrace: Millrace, built_tiny: Path) -> None:
    result = millrace("generate", built_tiny, *ASK, "--kv-memory", "1M")
    result.assert_mistake("--kv-memory 1 MiB holds 384 tokens", "5 MiB for one sequence", "--max-context 384")


def test_more_kv_memory_than_there_is(millrace: Millrace, built_tiny: Path) -> None:
    result = millrace("generate", built_tiny, *ASK, "--kv-memory", "4000G")
    result.assert_mistake("are available", "lower --kv-memory to")


def test_a_prompt_longer_than_the_context(millrace: Millrace, built_tiny: Path) -> None:
    millrace("generate", built_tiny, "-p", "word " * 5000).assert_mistake("2048")


def test_build_flags_with_a_built_engine(millrace: Millrace, built_tiny: Path) -> None:
    result = millrace("generate", built_tiny, *ASK, "--precision", "fp32")
    result.assert_mistake("--precision is given", "already built")


def test_building_an_engine_from_an_engine(millrace: Millrace, built_tiny: Path, tmp_path: Path) -> None:
    millrace("build", built_tiny, "-o", tmp_path / "again").assert_mistake("is an engine already")


def test_building_onto_something(millrace: Millrace, tmp_path: Path) -> None:
    millrace("build", "tiny", "-o", tmp_path).assert_mistake("is already there")


@pytest.mark.parametrize(
    "content, fragment",
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("[1]", "no map of names"),
        ('{"default": 4}', "no map of names"),
        ('{"lm_head": "bf16"}', "has no default"),
        ('{"default": "w5a8"}', '"w5a8" is unknown'),
    ],
)
def test_a_bad_map_of_precisions(millrace: Millrace, tmp_path: Path, content: str | None, fragment: str) -> None:
    file = tmp_path / "map.json"
    if content is not None:
        file.write_text(content)
    result = millrace("build", "tiny", "-o", tmp_path / "engine", "--precision-map", file)
    result.assert_mistake(fragment)
    assert not (tmp_path / "engine").exists()


def test_a_map_and_a_precision(millrace: Millrace, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"default": "w8a8"}))
    result = millrace("build", "tiny", "-o", tmp_path / "e", "--precision-map", file, "--precision", "bf16")
    result.assert_mistake("both given")


def test_a_cache_that_cannot_be_written(millrace: Millrace, cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    millrace("generate", "tiny", *ASK).assert_mistake("cache")
