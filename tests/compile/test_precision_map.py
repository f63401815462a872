"""Maps of precisions: which pattern decides, what the head has, what is refused."""

from dataclasses import replace

import pytest

from millrace.checkpoint.weights.quantized_matrix import FP8, QuantisedFormat
from millrace.compile.precision import (
    StoredMatrix,
    nearest_precisions,
    precision_map,
    rounding_notes,
    with_head_precision,
)
from millrace.errors import ConfigError
from millrace.kernels.precision import Precision


def test_precision_by_pattern() -> None:
    chosen = precision_map({"default": "w4a8", "layers.*.mlp.*": "w8a8", "lm_head": "bf16"})
    assert chosen.precision_of("model.layers.3.mlp.up_proj") == Precision.W8A8
    assert chosen.precision_of("model.layers.3.self_attn.q_proj") == Precision.W4A8
    assert chosen.precision_of("lm_head", is_head=True) == Precision.BF16


def test_groups_of_activations_by_pattern() -> None:
    """They belong to the pattern that decides; the head has those of the rest where it has 8-bit activations, too."""
    chosen = precision_map({"default": "w4a8:32", "layers.*.mlp.*": "w8a8:64", "layers.1.*": "w8a8", "x": "bf16"})
    names = ("layers.1.mlp.up", "layers.1.q", "layers.0.q", "x")
    assert [chosen.x_group_of(name) for name in names] == [64, 0, 32, 0]
    assert chosen.x_group_of("lm_head", is_head=True) == 32
    assert replace(chosen, head=Precision.BF16).x_group_of("lm_head", is_head=True) == 0
    again = precision_map(chosen.described("lm_head"))  # as the manifest says it
    assert again.x_group_of("lm_head", is_head=True) == 32 and again.x_groups[0] == chosen.x_groups[0]


def test_the_head_of_a_4_bit_engine() -> None:
    """Has eight bits, unless something else is asked for."""
    plain = precision_map("w4a8")
    assert plain.precision_of("head", is_head=True) == Precision.W8A8 and plain.precision_of("head") == Precision.W4A8
    assert precision_map("w4a16").precision_of("head", is_head=True) == Precision.W8A16
    assert precision_map("w4a8", head="w4a8").precision_of("head", is_head=True) == Precision.W4A8
    assert precision_map({"default": "w4a8", "head": "w4a8"}).precision_of("head", is_head=True) == Precision.W4A8


FP8_MATRIX, INT8_MATRIX = StoredMatrix("fp8", 100, FP8), StoredMatrix("int8", 10, QuantisedFormat(8, 64))


def test_fp8_is_kept_in_its_own_bytes_and_no_others_in_them() -> None:
    chosen = nearest_precisions({"q": FP8_MATRIX, "k": INT8_MATRIX, "lm_head": StoredMatrix("float32", 1)})
    assert (chosen.precision_of("q"), chosen.precision_of("k"), chosen.precision_of("lm_head", is_head=True)) == (
        "fp8a16",
        "w8a8",
        "fp32",
    )
    assert chosen.stored_format(FP8, Precision.FP8A16) == FP8 and chosen.stored_format(
        INT8_MATRIX.codes, Precision.W8A8
    )
    for precision in Precision:
        assert not (precision != Precision.FP8A16 and chosen.stored_format(FP8, precision)), precision
    assert not chosen.stored_format(INT8_MATRIX.codes, Precision.FP8A16)
    alone = nearest_precisions({"q": FP8_MATRIX})
    assert alone.meaning == precision_map("fp8a16").meaning, "of other matrices nothing is known"


def test_a_head_of_e4m3_is_one_that_a_checkpoint_stores() -> None:
    """E4M3 costs the distribution more than 8-bit integers of as many bytes; what is stored keeps its bytes."""
    plain = precision_map("fp8a16")
    assert (
        plain.precision_of("lm_head", is_head=True) == Precision.W8A16
        and plain.precision_of("layers.0.mlp") == Precision.FP8A16
    )
    stored = {"q": FP8_MATRIX, "lm_head": FP8_MATRIX}
    for chosen in (nearest_precisions(stored), with_head_precision(plain, stored)):
        assert chosen.precision_of("lm_head", is_head=True) == Precision.FP8A16
    floats = {"q": FP8_MATRIX, "lm_head": StoredMatrix("bfloat16", 1)}
    assert nearest_precisions(floats).precision_of("lm_head", is_head=True) == Precision.BF16
    assert with_head_precision(plain, floats).precision_of("lm_head", is_head=True) == Precision.W8A16


def test_what_becomes_of_fp8_is_said() -> None:
    stored = {"q": FP8_MATRIX}
    assert rounding_notes(stored, nearest_precisions(stored)) == ()
    assert rounding_notes(stored, precision_map("fp32")) == ()
    for precision in ("bf16", "w8a8"):
        (note,) = rounding_notes(stored, precision_map(precision))
        assert "1 of 1 matrices are stored as FP8 and rounded again" in note and "fp8a16 would keep them" in note
    (note,) = rounding_notes({"k": INT8_MATRIX}, precision_map("fp8a16"))
    assert "rounded again, from their exact values, to fp8a16 (FP8 weights" in note and "w8a8" in note


WRONG_PRECISIONS: tuple[tuple[str | dict[str, str], str], ...] = (
    ("w3a8", "w4a8"), ({"lm_head": "bf16"}, "default"), ({"default": "x"}, "bf16"), ("w4a16:32", "no groups"),
    ("bf16:8", "no groups"), ("w8a8:", "multiple of 8"), ("w8a8:12", "multiple of 8"), ("w8a8:0", "multiple of 8"),
    ("w8a8:-8", "multiple of 8"), ({"default": "w8a8", "x": "w8a8:99999"}, "multiple of 8"),
    ({"default": "w8a8", "x": "w4a8 with minimums"}, "where a checkpoint stores"),
    ("w4a8:32:min", "where a checkpoint stores"), ({}, "default"), ("AUTO", "auto, for the whole model"),
)  # fmt: skip


@pytest.mark.parametrize(("asked", "names"), WRONG_PRECISIONS)
def test_a_wrong_precision_says_what_there_is(asked: str | dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        precision_map(asked)


@pytest.mark.parametrize("group", [0, 3, 6, 8192])
def test_a_wrong_group_is_refused(group: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        precision_map("w4a8", group)
