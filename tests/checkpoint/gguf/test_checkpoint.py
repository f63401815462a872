"""A whole GGUF file beside the folder that it was made from: the same answers, the same tokens, one identity."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.engine.artifact.engine import Engine
from millrace.errors import CheckpointError
from millrace.kernels.matmul.pack import rounded_codes
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits
from tests.support.gguf_files import BLOCKY, FAMILIES, write_gguf
from tests.support.shared import shared

PROMPTS = [[1, 5, 9, 200], [7, 300, 12] * 9]


def logits(engine: Engine, prompts: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    executor = engine.executor(n_pages=8)
    try:
        return last_logits(engine, executor, prompts)
    finally:
        executor.close()


def greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    executor = engine.executor(n_pages=8)
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(last_logits(engine, executor, [tokens])[0].argmax()))
    executor.close()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    folder = random_checkpoint(tmp_path / "folder", family, seed=3, **FAMILIES[family])
    path = write_gguf(tmp_path / "m.gguf", folder)
    theirs, ours = (build(p, tmp_path / f"{p.stem}.engine", "fp32") for p in (folder, path))
    np.testing.assert_array_equal(logits(ours, PROMPTS), logits(theirs, PROMPTS))


@pytest.mark.parametrize(("dtype", "kind"), [("float16", Kind.F16), ("bfloat16", Kind.BF16)])
def test_half_precision_gives_the_same_logits(tmp_path: Path, dtype: str, kind: Kind) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", seed=3, dtype=dtype)
    path = write_gguf(tmp_path / "m.gguf", folder, kind)
    precision = "fp32" if dtype == "float16" else "bf16"
    theirs, ours = (build(p, tmp_path / f"{p.stem}.engine", precision) for p in (folder, path))
    np.testing.assert_array_equal(logits(ours, PROMPTS), logits(theirs, PROMPTS))


def test_a_real_model_says_the_same(tmp_path: Path) -> None:
    folder = shared("models/stories260K")
    path = write_gguf(tmp_path / "m.gguf", folder)
    theirs, ours = (build(p, tmp_path / f"{p.stem}.engine", "fp32") for p in (folder, path))
    expected = greedy(theirs, [1, 403, 407], 40)
    assert greedy(ours, [1, 403, 407], 40) == expected
    assert Checkpoint.open(path).tokenizer.decode(expected) == Checkpoint.open(folder).tokenizer.decode(expected)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.filterwarnings("default")  # of llama-cpp-python, while it loads
def test_llama_cpp_says_the_same(tmp_path: Path, family: str) -> None:
    """The file is what llama.cpp takes it for: its own greedy tokens of the same file, in float32."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    folder = random_checkpoint(tmp_path / "folder", family, seed=3, **BLOCKY)
    path = write_gguf(tmp_path / "m.gguf", folder)
    prompt = [1, 5, 9, 200, 17, 3]
    model = llama_cpp.Llama(
        str(path), n_ctx=128, n_threads=1, verbose=False, type_k=0, type_v=0, flash_attn=False, logits_all=True
    )
    tokens = list(prompt)
    for _ in range(16):
        model.reset()
        model.eval(tokens)
        tokens.append(int(np.argmax(model.scores[len(tokens) - 1])))
    model.close()
    assert greedy(build(path, tmp_path / "engine", "fp32"), prompt, 16) == tokens


def test_the_engine_serves_alone(tmp_path: Path) -> None:
    """It carries the tokenizer and the template that were made of the metadata."""
    folder = random_checkpoint(tmp_path / "folder", "llama", seed=3)
    path = write_gguf(tmp_path / "m.gguf", folder)
    engine = build(path, tmp_path / "engine", "fp32")
    opened = Checkpoint.open(path)
    carried = {"config.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json"}
    assert {p.name for p in engine.folder.iterdir()} >= set(opened.files) == carried
    assert engine.manifest.eos_token_ids == [2] and engine.manifest.bos_token_id == 1


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", seed=3)
    path = write_gguf(tmp_path / "m.gguf", folder)
    first = Checkpoint.open(path).identity()
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    os.utime(copy, ns=(2, 2))
    assert Checkpoint.open(copy).identity() == first and len(first) == 32
    seen = {first, Checkpoint.open(write_gguf(tmp_path / "o.gguf", folder, edit=lambda w: w.add_name("x"))).identity()}
    for place in (-1, -path.stat().st_size // 2):  # other weights behind the same header
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        copy.write_bytes(data)
        seen.add(Checkpoint.open(copy).identity())
    assert len(seen) == 4


def test_a_folder_with_a_gguf_file_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_checkpoint(tmp_path / "made", "llama"))
    with pytest.raises(CheckpointError, match="has GGUF files"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_not_finite_are_no_weights(bits: int) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        w = np.ones((3, 64), np.float32)
        w[1, 40] = bad
        with pytest.raises(CheckpointError, match="not finite"):
            rounded_codes(w, bits, 32)


def test_a_vocabulary_larger_than_the_model(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", vocab_size=500)
    with pytest.raises(CheckpointError, match="has 700 tokens"):
        Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder))


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_checkpoint(tmp_path / "folder", "llama"))
    opened = Checkpoint.open(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        for name in opened.tensors:
            opened.tensors.load(name)
