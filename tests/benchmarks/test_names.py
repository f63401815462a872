"""Numbers are named by the program that computes in them."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.names import named
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf


def built(folder: Path, out: Path, options: BuildOptions) -> dict[str, str]:
    source = Source.from_checkpoint(Checkpoint.open(folder), 64)
    write_engine(source, plan_engine(source, options), out, name="m")
    return named(Engine.open(out))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("m"), "llama", **BLOCKY)


def test_groups_of_activations_are_named_apart(llama: Path, tmp_path: Path) -> None:
    found = built(llama, tmp_path / "e", BuildOptions(precision=precision_map("w8a8:32", 128)))
    assert found["weights"].startswith("int8, groups of 128") and found["activations"].startswith("int8, groups of 32")


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("kv", [KvFormat.BF16, KvFormat.INT8])
def test_attention_by_tiles_is_named(llama: Path, tmp_path: Path, tiles: bool, kv: KvFormat) -> None:
    """Only where there are keys and values in bfloat16 for it."""
    found = built(llama, tmp_path / "e", BuildOptions(precision=precision_map("w8a8"), tiles=tiles, kv_format=kv))
    assert found["attention"] == ("attention by tiles" if tiles and kv == KvFormat.BF16 else "")
    assert found["kv"] == ("bf16" if kv == KvFormat.BF16 else "int8")


def test_minimums_of_a_file_are_named(llama: Path, tmp_path: Path) -> None:
    """Q4_1 as it is stored, the head too."""
    file = write_gguf(tmp_path / "m.gguf", llama, Kind.Q4_1)
    found = built(file, tmp_path / "e", BuildOptions())
    assert found["weights"] == "int4, groups of 32, with minimums" and found["activations"] == "int8, groups of 32"
    assert found["head"] == "w4a8 g32 with minimums" and found["attention"] == ""
