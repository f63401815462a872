"""Quantised GGUF files beside llama.cpp: its own quantiser makes the file, its own float32 says what the file means.

What is exact is llama.cpp's answer for the weights that it dequantises itself, in float32 throughout. In float32 ours
may differ by the order of sums. Where activations are rounded to 8 bits, as llama.cpp rounds them too, its own distance
from the exact answer is the measure of ours: the same sources of error in other groups and another order, so a factor
of two is room enough and a wrong scale or offset of one block type (of ten times that) is not.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.perplexity import Text, Variant, ours, tiny_text
from benchmarks.recipes import llama_cpps
from millrace.compile.resolve_model import BUNDLED
from millrace.evaluate.divergence import LogProbs, Reader
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.filterwarnings("default")  # of llama-cpp-python, while it loads
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K_M", "Q6_K")  # the embedding and rows of 640 are of other types in some
SUMS = 1e-3  # nats; float32 sums of 640 products in 5 layers: 1e-4 was seen, and 0.4 to 1.6 of 8-bit activations
FACTOR = 2.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    return write_gguf(tmp_path_factory.mktemp("plain") / "f32.gguf", BUNDLED / "tiny")


def read_whole(read: Reader, text: Text) -> LogProbs:
    return np.concatenate([read(ids, text.first) for ids in text.sequences])


def divergence(exact: LogProbs, found: LogProbs) -> float:
    """Mean KL, nats."""
    return float((np.exp(exact) * (exact - found)).sum(axis=1, dtype=np.float64).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_file(plain: Path, tmp_path: Path, kind: str) -> None:
    import llama_cpp

    from benchmarks.peers.gguf_file import quantise

    file, dequantised = tmp_path / f"{kind}.gguf", tmp_path / "dequantised.gguf"
    quantise(plain, file, kind)
    quantise(file, dequantised, "F32")
    text = Text(tiny_text().sequences[:16])
    with llama_cpps(dequantised, text.longest, llama_cpp.GGML_TYPE_F32) as (_, read, _):
        exact = read_whole(read, text)
    with llama_cpps(file, text.longest) as (_, read, _):
        theirs = read_whole(read, text)
    found = []
    for variant in (Variant("fp32", "fp32"), Variant("as stored", None), Variant("bf16", "bf16")):
        with ours(file, variant, text.longest) as (_, read, _):
            found.append(read_whole(read, text))
    in_float32, stored, half = found
    assert exact.shape == stored.shape == (text.n_scored, 2048)
    assert np.abs(in_float32 - exact).max() < SUMS
    assert (in_float32.argmax(axis=1) == exact.argmax(axis=1)).all(), "greedy tokens"
    assert np.abs(theirs - exact).max() > 10 * SUMS, "8-bit activations are far from what sums may differ by"
    assert divergence(exact, stored) < FACTOR * divergence(exact, theirs)
    assert divergence(exact, half) < FACTOR * divergence(exact, theirs), "bfloat16 rounds to as many bits"
