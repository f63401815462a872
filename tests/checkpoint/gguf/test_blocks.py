"""Every block type against llama.cpp's own formulas, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.checkpoint.gguf.blocks import TYPES, signed_codes
from tests.support.gguf_files import random_blocks

BLOCKS = [number for number, kind in TYPES.items() if kind.dequantise]


@pytest.mark.parametrize("number", BLOCKS, ids=[TYPES[n].name for n in BLOCKS])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_llama_cpps_to_the_bit(number: int, seed: int) -> None:
    """Blocks of random bits: scales are subnormal, infinite, negative and not a number as well."""
    kind = TYPES[number]
    raw = np.random.default_rng(seed).integers(0, 256, (300, kind.nbytes), dtype=np.uint8)
    assert kind.dequantise
    with np.errstate(all="ignore"):
        ours = kind.dequantise(raw.reshape(-1).view(kind.layout))
        theirs = gguf.quants.dequantize(raw, Kind(number))
    assert ours.shape == (300, kind.weights) and ours.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("number", TYPES, ids=[kind.name for kind in TYPES.values()])
def test_sizes_are_llama_cpps(number: int) -> None:
    kind = TYPES[number]
    assert (kind.weights, kind.nbytes) == gguf.GGML_QUANT_SIZES[Kind(number)] and kind.name == Kind(number).name


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_symmetric_types_are_integers_times_a_scale(name: str) -> None:
    kind = next(k for k in TYPES.values() if k.name == name)
    raw = np.random.default_rng(0).integers(0, 256, (300, kind.nbytes), dtype=np.uint8)
    blocks = raw.reshape(-1).view(kind.layout)
    codes = signed_codes(kind, blocks)
    assert kind.code_bits and kind.dequantise
    assert codes.dtype == np.int8 and codes.min() == -(2 ** (kind.code_bits - 1))
    assert codes.max() == 2 ** (kind.code_bits - 1) - 1
    with np.errstate(all="ignore"):
        products = blocks["scale"].astype(np.float32)[:, None] * codes
        np.testing.assert_array_equal(kind.dequantise(blocks), products)


def test_types_without_integers_have_none() -> None:
    assert {k.name for k in TYPES.values() if k.code_bits} == {"Q4_0", "Q5_0", "Q8_0"}
    assert random_blocks(np.ones((2, 256), np.float32), Kind.Q6_K).shape == (2, 210)
