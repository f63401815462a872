"""Files of every native family: the same configuration and tensors as the checkpoint that they were converted from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.config_writer import config_json
from millrace.checkpoint.config.model_config import read_config
from millrace.checkpoint.gguf.architectures import ARCHITECTURES, LAYOUTS, WITH_EXPERTS, WITH_WINDOWS
from millrace.errors import CheckpointError
from millrace.model.layers import inverse_frequencies
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_converter import OVERRIDES, convert
from tests.support.gguf_files import FAMILIES, Edit

# Smaller than the usual ones: heads of 64, of which llama.cpp wants hidden_size in all.
SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 720, "intermediate_size": 96,
}  # fmt: skip
U32, F32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32


def small(folder: Path, family: str, **more: Any) -> Path:
    sizes = SMALL | ({"num_key_value_heads": 2} if family in ("phi", "olmoe") else {})
    sizes |= {"intermediate_size": 512} if family == "phi" else {}
    own = {key: value for key, value in OVERRIDES[family].items() if key not in sizes or family == "ernie4_5_moe"}
    return random_checkpoint(folder, family, seed=2, **{**sizes, **own, **more})


def test_every_family_with_files_has_a_layout_and_a_test() -> None:
    families = {*ARCHITECTURES.values(), *WITH_EXPERTS.values(), *WITH_WINDOWS.values()}
    assert families == LAYOUTS.keys() == {*OVERRIDES, *FAMILIES} - {"mistral"}  # whose files say llama


@pytest.mark.parametrize("family", OVERRIDES)
def test_a_file_is_its_checkpoint(tmp_path: Path, family: str) -> None:
    theirs = Checkpoint.open(small(tmp_path / "folder", family))
    ours = Checkpoint.open(convert(tmp_path / "m.gguf", tmp_path / "folder"))
    a, b = theirs.decoder, ours.decoder
    expected, found = (inverse_frequencies(c.rope, c.rope.rotary_dim or c.head_dim) for c in (a, b))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    differing = {name for name in a.__slots__ if getattr(a, name) != getattr(b, name)} - {"eos_token_ids", "notes"}
    assert differing <= ({"rope"} if family in ("exaone4", "phi3") else set())  # its numbers are rounded to float32
    assert set(theirs.tensors) == set(ours.tensors)
    for name in theirs.tensors:
        expected, found = theirs.tensors.load(name), ours.tensors.load(name)
        if family == "nemotron" and name.endswith("norm.weight"):
            expected, found = expected + np.float32(1), (found.astype(np.float64) + 1).astype(np.float32)
        np.testing.assert_array_equal(found, expected.reshape(found.shape))  # ERNIE stores a bias as one row
    plain = replace(b, rope=replace(b.rope, divisors=()), notes=())
    assert replace(read_config(config_json(plain)), notes=()) == plain


def test_windows_of_exaone(tmp_path: Path) -> None:
    """The file says which layers have a window; the others have no rotary positions."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = small(tmp_path / "folder", "exaone4", num_hidden_layers=3, sliding_window=33, layer_types=kinds)
    ours = Checkpoint.open(convert(tmp_path / "m.gguf", folder)).decoder
    assert ours.windows == (33, 0, 33) and ours.rotates == (True, False, True)
    assert ours.windows == Checkpoint.open(folder).decoder.windows


def test_experts_keep_their_codes(tmp_path: Path) -> None:
    """Each expert's part of a stack in blocks is a matrix of its own; a stack of gate and up alternates by expert."""
    folder = small(tmp_path / "folder", "qwen2_moe", moe_intermediate_size=96, shared_expert_intermediate_size=96)
    path = convert(tmp_path / "m.gguf", folder, Kind.Q8_0)
    ours = Checkpoint.open(path).tensors
    (stack,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down_exps.weight"]
    expected = gguf.quants.dequantize(stack.data, Kind.Q8_0)
    for expert in range(6):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        np.testing.assert_array_equal(ours.load(name), expected[expert])
        held = ours.stored(name, 8, 32)
        assert held is not None
        np.testing.assert_array_equal(held.dequantise().astype(np.float32), expected[expert])


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe"])
def test_tensors_that_are_written_as_one(tmp_path: Path, family: str) -> None:
    """Converters can write q, k and v, and the gate and up of all experts, as one tensor."""
    folder = small(tmp_path / "folder", family)
    plain = Checkpoint.open(convert(tmp_path / "plain.gguf", folder)).tensors

    def edit(writer: gguf.GGUFWriter) -> None:
        for tensors in writer.tensors:
            for name in [name for name in tensors if "attn_q." in name or "gate_exps" in name]:
                is_stack = "exps" in name
                parts = (
                    [name, name.replace("gate", "up")] if is_stack else [name.replace("_q.", f"_{x}.") for x in "qkv"]
                )
                joined = np.concatenate([tensors.pop(part).tensor for part in parts], axis=1 if is_stack else 0)
                whole = name.replace("gate_exps", "gate_up_exps").replace("attn_q.", "attn_qkv.")
                writer.add_tensor(whole, joined)

    joined = Checkpoint.open(convert(tmp_path / "joined.gguf", folder, edit=edit)).tensors
    assert set(plain) == set(joined)
    for name in plain:
        np.testing.assert_array_equal(plain.load(name), joined.load(name))


def test_layers_that_predict_several_tokens_are_not_used(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["glm4moe.block_count"].value = 3
        writer.add_uint32("glm4moe.nextn_predict_layers", 1)
        writer.add_tensor("blk.2.nextn.enorm.weight", np.ones(128, np.float32))

    opened = Checkpoint.open(convert(tmp_path / "m.gguf", small(tmp_path / "folder", "glm4_moe"), edit=edit))
    assert opened.decoder.n_layers == 2 and "last 1 of 3 layers" in opened.notes[0]


def with_value(key: str, value: object, kind: gguf.GGUFValueType = U32) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return edit


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: small(tmp_path_factory.mktemp(family), family) for family in ("glm4_moe", "qwen3_moe", "lfm2", "olmo3")
    }


@pytest.mark.parametrize(
    ("family", "key", "value", "word"),
    [
        ("qwen3_moe", "qwen3moe.expert_count", 5, "ffn_gate_inp.weight is (6, 128)"),
        ("glm4_moe", "glm4moe.expert_count", 0, "at least 1"),
        ("glm4_moe", "glm4moe.expert_count", 4096, "at most 1024"),
        ("glm4_moe", "glm4moe.expert_used_count", 7, "at most 6 of 6 experts"),
        ("glm4_moe", "glm4moe.expert_group_count", 4, "a divisor of the 6 experts"),
        ("glm4_moe", "glm4moe.expert_group_used_count", 4, "at most 3 groups"),
        ("glm4_moe", "glm4moe.expert_gating_func", 1, "2 (sigmoid)"),
        ("glm4_moe", "glm4moe.leading_dense_block_count", 2, "at least one of 2 layers"),
        ("glm4_moe", "glm4moe.leading_dense_block_count", 0, "no tensor blk.0.ffn_gate_inp.weight"),
        ("glm4_moe", "glm4moe.rope.dimension_count", 33, "an even number"),
        ("glm4_moe", "glm4moe.nextn_predict_layers", 2, "less than glm4moe.block_count"),
        ("qwen3_moe", "qwen3moe.expert_feed_forward_length", 75, "(6, 75, 128), by the file's metadata"),
        ("qwen3_moe", "qwen3moe.expert_group_count", 2, "0 or 1: no other"),
        ("qwen3_moe", "qwen3moe.expert_weights_scale", 2.5, "0.0 or 1.0: no other"),
        ("lfm2", "lfm2.shortconv.l_cache", 9, "no kernel takes others"),
        ("lfm2", "lfm2.attention.head_count_kv", 1, "an array of 3 integers"),
        ("olmo3", "olmo2.rope.scaling.factor", 0.5, "at least 1"),
        ("olmo3", "olmo2.rope.scaling.yarn_beta_fast", 0.5, "more than yarn_beta_slow"),
        ("olmo3", "olmo2.rope.scaling.type", "ntk", "none, linear, yarn, longrope"),
        ("olmo3", "olmo2.rope.scaling.type", "longrope", "rope_factors_short.weight"),
    ],
)
def test_contradictions_are_named(
    tmp_path: Path, folders: dict[str, Path], family: str, key: str, value: object, word: str
) -> None:
    kind = {str: gguf.GGUFValueType.STRING, float: F32, int: U32}[type(value)]
    path = convert(tmp_path / "m.gguf", folders[family], edit=with_value(key, value, kind))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert word in str(caught.value)


def test_a_stack_of_other_experts_than_the_router_has(tmp_path: Path, folders: dict[str, Path]) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        tensors = writer.tensors[0]
        name = "blk.1.ffn_up_exps.weight"
        writer.add_tensor("blk.1.ffn_up_exps.weight", tensors.pop(name).tensor[:5])

    path = convert(tmp_path / "m.gguf", folders["qwen3_moe"], edit=edit)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight is \(5, 76, 128\)"):
        Checkpoint.open(path)


def test_experts_and_no_stated_norm_of_weights(tmp_path: Path, folders: dict[str, Path]) -> None:
    edit = with_value("qwen3moe.expert_weights_norm", False, gguf.GGUFValueType.BOOL)
    with pytest.raises(CheckpointError, match="expert_weights_norm"):
        Checkpoint.open(convert(tmp_path / "m.gguf", folders["qwen3_moe"], edit=edit))
