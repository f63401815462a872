"""Weights that a checkpoint holds in integers: taken over as they are where an engine has such, said where not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from benchmarks.peers.gguf_file import gguf_name
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, Plan, plan_engine
from millrace.compile.precision import StoredMatrix, nearest_precisions, precision_map, rounding_notes
from millrace.compile.source import Source
from millrace.kernels.places import Packed
from millrace.kernels.precision import Precision
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf

PANEL = 32
Blocks = tuple[NDArray[np.integer[Any]], NDArray[np.float16]]  # codes (N, K), scales (N, K/32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=4, **BLOCKY)


def plan(path: Path, precision: str | None = None, group: int = 32) -> Plan:
    options = BuildOptions(precision=precision_map(precision, group) if precision else None)
    return plan_engine(Source.from_checkpoint(Checkpoint.open(path)), options)


def rounded(made: Plan) -> list[str]:
    return [note for note in made.notes if "rounded again" in note]


def unpacked(packed: Packed) -> Blocks:
    """Codes and scales out of the panels of 32 outputs that kernels read, in groups of 32 inputs."""
    bits = 4 if packed.format.startswith("w4") else 8
    N, K = packed.shape
    groups = packed.pack().reshape(-(-N // PANEL), K // 32, -1)  # panel, group, bytes
    scales = np.ascontiguousarray(groups[:, :, -64:]).view(np.float16).transpose(0, 2, 1).reshape(-1, K // 32)
    lines = groups[:, :, :-64]
    if bits == 8:
        codes = lines.reshape(-1, K // 32, 8, PANEL, 4).transpose(0, 3, 1, 2, 4)
    else:
        pairs = lines.reshape(-1, K // 32, 4, PANEL, 4).transpose(0, 3, 1, 2, 4)  # panel, output, group, block, byte
        codes = np.stack([pairs & 15, pairs >> 4], axis=-2)
    return codes.reshape(-1, K)[:N].astype(np.int16) - (1 << bits - 1), scales[:N]


def in_file(path: Path, name: str) -> Blocks:
    """The same, read from the file by the gguf package, in the order of the file's rows."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    raw = tensor.data
    width = {Kind.Q4_0: 18, Kind.Q8_0: 34}[tensor.tensor_type]
    blocks = raw.reshape(raw.shape[0], -1, width)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    body = blocks[:, :, 2:]
    if tensor.tensor_type == Kind.Q4_0:
        codes = np.concatenate([body & 15, body >> 4], axis=2).astype(np.int16) - 8
    else:
        codes = np.ascontiguousarray(body).view(np.int8).astype(np.int16)
    return codes.reshape(raw.shape[0], -1), scales


def original_rows(n: int) -> NDArray[np.integer[Any]]:
    """Where the file has the rows of q and k: heads of 64, halves beside each other."""
    return np.concatenate([[64 * h + 2 * (i % 32) + i // 32 for i in range(64)] for h in range(n // 64)])


def expected(path: Path, origin: tuple[str, ...]) -> Blocks:
    """Of a packed matrix made of these layers: q, k and v below each other, gate and up interleaved by 16 rows."""
    parts = []
    for name in origin:
        codes, scales = in_file(path, gguf_name(name))
        if "q_proj" in name or "k_proj" in name:
            rows = original_rows(len(codes))
            codes, scales = codes[rows], scales[rows]
        parts.append((codes, scales))
    if "gate_proj" in origin[0]:
        mixed = [np.stack([p[i].reshape(-1, 16, p[i].shape[1]) for p in parts], 1) for i in range(2)]
        return tuple(m.reshape(-1, m.shape[-1]) for m in mixed)  # type: ignore[return-value]
    return np.concatenate([c for c, _ in parts]), np.concatenate([s for _, s in parts])


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (Kind.Q4_0, None), (Kind.Q8_0, None), (Kind.Q4_0, "w4a16"), (Kind.Q8_0, "w8a16"),
        (Kind.Q4_0, "w8a8"),  # four bits fit into eight
    ],
)  # fmt: skip
def test_codes_and_scales_are_the_files(tmp_path: Path, folder: Path, kind: Kind, precision: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, kind)
    made = plan(path, precision)
    matrices = [w for w in made.program.weights if w.format in ("w4g32", "w8g32")]
    assert {len(w.origin) for w in matrices} == {1, 2, 3}, "q, k, v together; gate and up together; others alone"
    for packed in matrices:
        codes, scales = unpacked(packed)
        wanted_codes, wanted_scales = expected(path, packed.origin)
        np.testing.assert_array_equal(codes, wanted_codes, err_msg=packed.name)
        np.testing.assert_array_equal(scales.view(np.uint16), wanted_scales.view(np.uint16), err_msg=packed.name)
    assert made.notes == (f"the embedding table, stored as {kind.name}, is rounded to bfloat16",)


def test_a_mixture_keeps_what_it_can(tmp_path: Path, folder: Path) -> None:
    """q and k in Q4_0 beside v in Q4_1, all in one product of w4a8: the first two unchanged, the third rounded."""
    path = write_gguf(tmp_path / "m.gguf", folder, lambda n: Kind.Q4_1 if "attn_v" in n else Kind.Q4_0)
    made = plan(path, "w4a8", 32)
    assert len(rounded(made)) == 1 and "2 of 15 matrices are stored as Q4_1" in made.notes[0]
    qkv = next(w for w in made.program.weights if len(w.origin) == 3)
    codes, scales = unpacked(qkv)
    wanted_codes, wanted_scales = expected(path, qkv.origin[:2])
    np.testing.assert_array_equal(codes[: len(wanted_codes)], wanted_codes)
    np.testing.assert_array_equal(scales[: len(wanted_scales)], wanted_scales)
    exact = Checkpoint.open(path).tensors.load(qkv.origin[2]).astype(np.float64)
    wide = np.repeat(scales[len(wanted_scales) :].astype(np.float64), 32, axis=1)
    assert (np.abs(codes[len(wanted_codes) :] * wide - exact) <= 1.01 * np.abs(wide)).all()


def test_other_groups_are_rounded_again_and_said(tmp_path: Path, folder: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, Kind.Q4_0)
    assert "groups of 128" in plan(path, "w4a8", 128).notes[0]
    assert plan(path, "fp32").notes == () and "bf16" in plan(path, "bf16").notes[0]


KINDS: list[tuple[Kind | Callable[[str], Kind], str, dict[str, str], int]] = [
    (Kind.F32, "fp32", {}, 128),
    (Kind.F16, "fp32", {}, 128),
    (Kind.BF16, "bf16", {}, 128),
    (Kind.Q4_0, "w4a8", {"lm_head": "w4a8"}, 32),
    (Kind.Q4_1, "w8a8", {}, 32),  # four bits and a minimum per group: only eight hold them
    (Kind.Q4_K, "w8a8", {}, 32),
    (Kind.Q5_K, "w8a8", {}, 32),
    (Kind.Q6_K, "w8a8", {}, 32),
    (Kind.Q8_0, "w8a8", {}, 32),
    (lambda name: Kind.Q6_K if name == "output.weight" else Kind.Q4_0, "w4a8", {}, 32),
    (lambda name: Kind.F16 if name == "output.weight" else Kind.Q8_0, "w8a8", {"lm_head": "fp32"}, 32),
]


@pytest.mark.parametrize(("kind", "default", "patterns", "group"), KINDS)
def test_the_default_precision_follows_the_file(
    tmp_path: Path, folder: Path, kind: Kind | Callable[[str], Kind], default: str, patterns: dict[str, str], group: int
) -> None:
    chosen = plan(write_gguf(tmp_path / "m.gguf", folder, kind)).precision
    assert (chosen.default.value, chosen.group) == (default, group)
    assert {pattern: p.value for pattern, p in chosen.patterns} == patterns


def test_a_tied_head_has_the_embeddings_type(tmp_path: Path, folder: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", folder, lambda n: Kind.Q8_0 if n == "token_embd.weight" else Kind.Q4_0,
        leave_out=("output.weight",),
    )  # fmt: skip
    made = plan(path)
    head = next(w for w in made.program.weights if w.format == "w8g32")
    assert rounded(made) == [] and made.precision.patterns == (("lm_head", Precision.W8A8),)
    np.testing.assert_array_equal(unpacked(head)[0], in_file(path, "token_embd.weight")[0])


def test_a_mixture_by_layers() -> None:
    stored = {"a.down": StoredMatrix("q4_0", 10), "b.down": StoredMatrix("q6_k", 10), "c": StoredMatrix("q4_0", 5)}
    chosen = nearest_precisions(stored)
    assert (chosen.default.value, [n for n, _ in chosen.patterns]) == ("w4a8", ["b.down"])
    (note,) = rounding_notes(stored, chosen)
    assert "1 of 3 matrices are stored as Q6_K" in note


@pytest.mark.parametrize("dtype", ["q4_1", "q4_k"])
def test_the_note_says_why_four_bits_become_eight(dtype: str) -> None:
    """Nobody asked for 4 bits, and they would change answers: SmolLM2-135M in Q4_1 loops in greedy chat as w4a8."""
    stored = {"a": StoredMatrix(dtype, 10), "b": StoredMatrix("q4_0", 4)}
    chosen = nearest_precisions(stored)
    assert chosen.of("a") is Precision.W8A8 and chosen.of("b") is Precision.W4A8
    (note,) = rounding_notes(stored, chosen)
    assert "minimum per group" in note and "w8a8 with groups of 32" in note
