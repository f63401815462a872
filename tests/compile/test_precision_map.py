"""Maps of precisions: which pattern decides, what the head has, what is refused."""

from dataclasses import replace

import pytest

from millrace.compile.precision import precision_map
from millrace.errors import ConfigError
from millrace.kernels.precision import Precision


def test_precision_by_pattern() -> None:
    chosen = precision_map({"default": "w4a8", "layers.*.mlp.*": "w8a8", "lm_head": "bf16"})
    assert chosen.of("model.layers.3.mlp.up_proj") == Precision.W8A8
    assert chosen.of("model.layers.3.self_attn.q_proj") == Precision.W4A8
    assert chosen.of("lm_head", is_head=True) == Precision.BF16


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
    assert plain.of("head", is_head=True) == Precision.W8A8 and plain.of("head") == Precision.W4A8
    assert precision_map("w4a16").of("head", is_head=True) == Precision.W8A16
    assert precision_map("w4a8", head="w4a8").of("head", is_head=True) == Precision.W4A8
    assert precision_map({"default": "w4a8", "head": "w4a8"}).of("head", is_head=True) == Precision.W4A8


WRONG_PRECISIONS = (
    ("w3a8", "w4a8"), ({"lm_head": "bf16"}, "default"), ({"default": "x"}, "bf16"), ("w4a16:32", "no groups"),
    ("bf16:8", "no groups"), ("w8a8:", "multiple of 8"), ("w8a8:12", "multiple of 8"), ("w8a8:0", "multiple of 8"),
    ("w8a8:-8", "multiple of 8"), ({"default": "w8a8", "x": "w8a8:99999"}, "multiple of 8"),
    ({"default": "w8a8", "x": "w4a8 with minimums"}, "where a checkpoint stores"),
)  # fmt: skip


@pytest.mark.parametrize(("asked", "names"), WRONG_PRECISIONS)
def test_a_wrong_precision_says_what_there_is(asked: str | dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        precision_map(asked)


@pytest.mark.parametrize("group", [0, 3, 6, 8192])
def test_a_wrong_group_is_refused(group: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        precision_map("w4a8", group)
