"""Tensors come out as the Hugging Face folder has them, whatever the converter did to their order."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.peers.gguf_file import gguf_name
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, FAMILIES, write_gguf

QUANTISED = [
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS,
    Kind.MXFP4,
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_the_folders_to_the_bit(tmp_path: Path, family: str) -> None:
    folder = random_checkpoint(tmp_path / "folder", family, seed=2, **FAMILIES[family])
    theirs, ours = Checkpoint.open(folder).tensors, Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder)).tensors
    assert set(theirs) == set(ours)
    for name in theirs:
        expected, found = theirs.load(name), ours.load(name)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            # llama.cpp's converter has rounded weight + 1; what is added to it later must give that again
            np.testing.assert_array_equal((found.astype(np.float64) + 1).astype(np.float32), expected + np.float32(1))
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_type(tmp_path: Path, dtype: str) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", dtype=dtype)
    path = write_gguf(tmp_path / "m.gguf", folder, Kind.F16 if dtype == "float16" else Kind.BF16)
    theirs, ours = Checkpoint.open(folder).tensors, Checkpoint.open(path).tensors
    for name in theirs:
        found = ours.load(name)
        assert str(found.dtype) == (dtype if found.ndim == 2 else "float32")
        np.testing.assert_array_equal(found.astype(np.float32), theirs.load(name).astype(np.float32))


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_are_dequantised_then_put_in_order(tmp_path: Path, kind: Kind) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", **BLOCKY)
    path = write_gguf(tmp_path / "m.gguf", folder, kind)
    raw = {t.name: gguf.quants.dequantize(t.data, kind) for t in gguf.GGUFReader(path).tensors if t.tensor_type == kind}
    ours = Checkpoint.open(path).tensors
    for name in ours:
        if gguf_name(name) not in raw:
            continue
        expected = raw[gguf_name(name)]
        if "q_proj" in name or "k_proj" in name:
            rows = [[64 * h + 2 * (i % 32) + i // 32 for i in range(64)] for h in range(expected.shape[0] // 64)]
            expected = expected[np.concatenate(rows)]
        np.testing.assert_array_equal(ours.load(name), expected)
        held = ours.format(name)
        assert held
        stored = ours.stored(name, 8, held.group)
        assert stored and stored.format == replace(held, bits=8)
        np.testing.assert_array_equal(stored.dequantise().astype(np.float32), expected)
        assert ours.stored(name, 8, 128) is None and (ours.stored(name, 4, held.group) is None) == (held.bits > 4)


def test_mxfp4_beyond_float16_is_read_as_floats(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", **BLOCKY)
    path = write_gguf(tmp_path / "m.gguf", folder, Kind.MXFP4)
    name, whole = "model.layers.0.mlp.down_proj.weight", Checkpoint.open(path).tensors
    place = whole[name].offset
    assert whole.format(name) is not None
    data = bytearray(path.read_bytes())
    data[place], data[place + 1] = 60, 0x11
    path.write_bytes(data)
    tensors = Checkpoint.open(path).tensors
    assert tensors.format(name) is None and tensors.stored(name, 8, 32) is None
    assert tensors.load(name)[0, 0] == 0.5 * 2.0 ** (60 - 127)
    assert tensors.format("model.layers.0.mlp.up_proj.weight") is not None


def test_a_missing_head_is_the_embedding(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama")
    assert not Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder)).decoder.tie_embeddings
    tied = Checkpoint.open(write_gguf(tmp_path / "t.gguf", folder, leave_out=("output.weight",)))
    assert tied.decoder.tie_embeddings and "lm_head.weight" not in tied.tensors


def test_biases_of_q_and_k_move_with_their_rows(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama", attention_bias=True, mlp_bias=True)
    theirs, ours = Checkpoint.open(folder), Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder))
    assert ours.decoder.attention_bias and ours.decoder.attention_output_bias and ours.decoder.mlp_bias
    for name in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors.load(name), theirs.tensors.load(name))


@pytest.mark.parametrize(
    ("leave_out", "extra", "word"),
    [
        ("blk.1.ffn_up.weight", None, "no tensor blk.1.ffn_up.weight"),
        ("token_embd.weight", None, "token_embd.weight is missing"),
        ("", "blk.0.attn_sub_norm.weight", "blk.0.attn_sub_norm.weight is not used"),
        ("blk.0.ffn_norm.weight", "blk.0.ffn_norm.weight", "is (7,) F32"),
        ("", "rope_freqs.weight", "rope_freqs.weight is (7,) F32"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, leave_out: str, extra: str | None, word: str) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        if extra:
            writer.add_tensor(extra, np.ones(7, np.float32))

    folder = random_checkpoint(tmp_path / "folder", "llama")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder, edit=edit, leave_out=(leave_out,)))
    assert word in caught.value.what


def test_frequencies_of_nought_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "folder", "llama")
    zeros = np.zeros(32, np.float32)
    path = write_gguf(tmp_path / "m.gguf", folder, edit=lambda w: w.add_tensor("rope_freqs.weight", zeros))
    with pytest.raises(CheckpointError, match="above zero"):
        Checkpoint.open(path)
