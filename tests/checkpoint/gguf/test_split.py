"""Models in several files, as llama.cpp's gguf-split divides them."""

import shutil
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_converter import OVERRIDES, convert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one whole file, and its parts."""
    folder = tmp_path_factory.mktemp("split")
    made = random_checkpoint(folder / "made", "qwen3_moe", seed=2, hidden_size=128, **OVERRIDES["qwen3_moe"])
    convert(folder / "whole.gguf", made)
    convert(folder / "model.gguf", made, part=12)
    assert len(list(folder.glob("model-*-of-00003.gguf"))) == 3
    return folder


@pytest.fixture
def parts(tmp_path: Path, model: Path) -> Path:
    """The first part of a copy."""
    for path in model.glob("model-*.gguf"):
        shutil.copy(path, tmp_path / path.name)
    return tmp_path / "model-00001-of-00003.gguf"


def test_the_first_part_opens_all(model: Path) -> None:
    whole, split = Checkpoint.open(model / "whole.gguf"), Checkpoint.open(model / "model-00001-of-00003.gguf")
    assert split.decoder == whole.decoder and set(split.tensors) == set(whole.tensors)
    for name in whole.tensors:
        np.testing.assert_array_equal(split.tensors.load(name), whole.tensors.load(name))
    assert len({split.tensors[name].file for name in split.tensors}) == 3
    assert split.identity() != whole.identity()


def test_a_change_in_a_later_part_is_another_model(parts: Path) -> None:
    before = Checkpoint.open(parts).identity()
    last = parts.with_name("model-00003-of-00003.gguf")
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert Checkpoint.open(parts).identity() != before


def error(path: Path) -> str:
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    return str(caught.value)


def test_another_part_than_the_first(parts: Path) -> None:
    message = error(parts.with_name("model-00002-of-00003.gguf"))
    assert "is part 2 of 3" in message and "name model-00001-of-00003.gguf" in message


def test_a_missing_part(parts: Path) -> None:
    parts.with_name("model-00002-of-00003.gguf").unlink()
    assert "1 of 3 parts are missing: model-00002-of-00003.gguf" in error(parts)


@pytest.mark.parametrize("nbytes", [0, 10, 100, -1])
def test_a_truncated_part(parts: Path, nbytes: int) -> None:
    last = parts.with_name("model-00003-of-00003.gguf")
    last.write_bytes(last.read_bytes()[:nbytes])
    assert str(last) in error(parts)


def test_a_part_of_another_place(parts: Path) -> None:
    shutil.copy(parts.with_name("model-00003-of-00003.gguf"), parts.with_name("model-00002-of-00003.gguf"))
    assert "is part 3 of 3 by its metadata" in error(parts)


def test_a_renamed_file(parts: Path) -> None:
    assert "a name that ends in -00001-of-00003.gguf" in error(parts.rename(parts.with_name("model.gguf")))


def rewritten(path: Path, key: str, value: int) -> None:
    """Change a number of a header in place."""
    field = gguf.GGUFReader(path, "r+").fields[key]
    field.parts[field.data[0]][:] = value


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("split.tensors.count", 7, "split.tensors.count = 7"),
        ("split.count", 4, "-00001-of-00004"),
        ("split.no", 1, "is part 2"),
    ],
)
def test_contradictory_keys(parts: Path, key: str, value: int, word: str) -> None:
    rewritten(parts, key, value)
    assert word in error(parts)
