"""Files of every family against llama.cpp itself: what its graph computes is what a file means.

Prompts are longer than windows and original contexts. In float32 only the order of sums differs.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits
from tests.support.gguf_converter import OVERRIDES, convert
from tests.support.gguf_files import BLOCKY, write_gguf
from tests.support.gguf_files import FAMILIES as EARLIER

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]  # of llama-cpp-python, while it loads
LENGTHS = (1, 40, 100)
SUMS = 2e-4  # of logits of about 10: 3e-5 was seen
GELU_TABLE = 1e-2  # llama.cpp looks GELU up in a table of float16: 3e-3 was seen
OWN_GELU = ("phi", "starcoder2", "gemma", "gemma2", "gemma3_text")
# llama.cpp computes it with RMSNorm, and normalises the softmax of the chosen experts: not the original's routing.
UNLIKE_THE_ORIGINAL = ("phimoe",)
FAMILIES = [family for family in OVERRIDES if family not in UNLIKE_THE_ORIGINAL]
# Windows of EXAONE 4, which llama.cpp applies in models of 64 layers alone.
LARGE_EXAONE: dict[str, Any] = {
    "num_hidden_layers": 64, "sliding_window": 33, "hidden_size": 128, "num_attention_heads": 2,
    "intermediate_size": 96, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
}  # fmt: skip
Logits = np.ndarray[Any, np.dtype[np.float32]]


def prompt() -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(3, 690, LENGTHS[-1]).tolist()
    return tokens


def theirs(path: Path) -> Logits:
    """Return llama.cpp's logits behind the first n tokens, for each of LENGTHS."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = llama_cpp.Llama(
        str(path), n_ctx=512, n_threads=1, verbose=False, type_k=0, type_v=0, flash_attn=False, logits_all=True
    )
    model.eval(prompt())
    logits: Logits = np.array([model.scores[n - 1] for n in LENGTHS])
    model.close()
    return logits


def ours(path: Path, out: Path, precision: str | None = "fp32") -> Logits:
    """precision: None for the file's own codes, with activations in 8 bits as in llama.cpp"""
    engine = build(path, out, precision)
    executor = engine.executor(n_pages=64)
    try:
        return last_logits(engine, executor, [prompt()[:n] for n in LENGTHS])
    finally:
        executor.close()


@pytest.mark.parametrize("family", [*FAMILIES, *EARLIER])
def test_logits_of_a_family(tmp_path: Path, family: str) -> None:
    sizes = EARLIER[family] if family in EARLIER else OVERRIDES[family]
    folder = random_checkpoint(tmp_path / "folder", family, seed=2, **sizes)
    path = (write_gguf if family in EARLIER else convert)(tmp_path / "m.gguf", folder)
    expected = theirs(path)
    assert np.abs(expected).max() > 1
    limit = GELU_TABLE if family in OWN_GELU else SUMS
    assert np.abs(ours(path, tmp_path / "engine") - expected).max() < limit


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "rope", "attn_factor"),
    [("smollm3", YARN, None), ("stablelm", {**YARN, "partial_rotary_factor": 0.25}, None), ("granite", YARN, 1.3)],
)
def test_yarn(tmp_path: Path, family: str, rope: dict[str, Any], attn_factor: float | None) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        if attn_factor is not None:
            writer.add_rope_scaling_attn_factors(attn_factor)

    sizes = {**OVERRIDES[family], "rope_parameters": rope}
    path = convert(tmp_path / "m.gguf", random_checkpoint(tmp_path / "folder", family, seed=2, **sizes), edit=edit)
    assert np.abs(ours(path, tmp_path / "engine") - theirs(path)).max() < SUMS


def test_windows_of_the_large_exaone(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "exaone4", seed=2, **LARGE_EXAONE)
    path = convert(tmp_path / "m.gguf", folder)
    assert np.abs(ours(path, tmp_path / "engine") - theirs(path)).max() < 10 * SUMS


def test_a_split_file(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "mixtral", seed=2, **OVERRIDES["mixtral"])
    convert(tmp_path / "m.gguf", folder, part=10)
    first = min(tmp_path.glob("m-00001-of-*.gguf"))
    assert np.abs(ours(first, tmp_path / "engine") - theirs(first)).max() < SUMS


@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4_MOE"])
def test_experts_in_blocks(tmp_path: Path, kind: str) -> None:
    """llama.cpp's quantiser makes the file; its own dequantisation, in float32, says what the file means."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from benchmarks.peers.gguf_file import quantise

    sizes = {**BLOCKY, "moe_intermediate_size": 256}
    folder = random_checkpoint(tmp_path / "folder", "qwen3_moe", seed=2, **sizes)
    plain, file, exact = (tmp_path / f"{name}.gguf" for name in ("plain", "blocks", "exact"))
    convert(plain, folder)
    quantise(plain, file, kind)
    quantise(file, exact, "F32")
    stacks = {t.tensor_type for t in gguf.GGUFReader(file).tensors if "down_exps" in t.name}
    assert stacks <= {Kind[kind.removesuffix("_MOE")], Kind.Q5_K, Kind.Q5_0}  # more bits for the first layers
    right = theirs(exact)
    assert np.abs(ours(file, tmp_path / "engine") - right).max() < SUMS
    stored, as_llama_cpp = ours(file, tmp_path / "stored", None) - right, theirs(file) - right
    assert np.square(stored).mean() < 4 * np.square(as_llama_cpp).mean()
