"""Every block type against llama.cpp's own formulas, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.checkpoint.gguf.blocks import TYPES, in_codes, is_exact_in_codes, stored_format
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat
from tests.support.gguf_files import random_blocks

TABLES = {"IQ4_NL": (-127, 113), "IQ4_XS": (-127, 113), "MXFP4": (-12, 12)}  # codes that are numbers of a table
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


@pytest.mark.parametrize("number", BLOCKS, ids=[TYPES[n].name for n in BLOCKS])
def test_codes_and_scales_are_the_weights(number: int) -> None:
    """Exactly: the file's float32 formula rounds once, at its end, and so does float32 of the codes' float64."""
    kind = TYPES[number]
    assert kind.dequantise and kind.format
    raw = np.random.default_rng(0).integers(0, 256, (300, kind.nbytes), dtype=np.uint8)
    blocks = raw.reshape(-1).view(kind.layout)
    if kind.name == "MXFP4":
        blocks["exponent"] = 104 + blocks["exponent"] % 40  # of float16
    with np.errstate(all="ignore"):
        weights = kind.dequantise(blocks)
    finite = np.isfinite(weights).all(axis=1)
    found = in_codes(kind, blocks[finite])
    low = 0 if kind.format.minimums else -(2 ** (kind.format.bits - 1))
    low, high = TABLES.get(kind.name, (low, low + 2**kind.format.bits - 1))
    assert finite.sum() > 250 and found.format == kind.format and is_exact_in_codes(kind, blocks)
    assert found.codes.min() == low and found.codes.max() == high
    np.testing.assert_array_equal(found.dequantise().astype(np.float32), weights[finite])


@pytest.mark.parametrize(
    ("exponent", "code", "is_exact"), [(103, 1, False), (144, 7, False), (0, 0, True), (255, 8, True)]
)
def test_scales_of_mxfp4_that_float16_does_not_represent(exponent: int, code: int, is_exact: bool) -> None:
    """A block of zeros is exact with any scale."""
    (kind,) = (kind for kind in TYPES.values() if kind.name == "MXFP4")
    blocks = np.zeros(3, kind.layout)
    blocks["exponent"], blocks["codes"][1] = exponent, code
    assert is_exact_in_codes(kind, blocks) is is_exact
    if is_exact:
        assert not in_codes(kind, blocks).dequantise().any()


def test_which_types_have_codes() -> None:
    assert [k.name for k in TYPES.values() if not k.format] == ["F32", "F16", "BF16"]
    assert stored_format("float16") is None and stored_format("q6_k") == QuantisedFormat(6, 16, two_levels=True)
    assert random_blocks(np.ones((2, 256), np.float32), Kind.Q6_K).shape == (2, 210)
