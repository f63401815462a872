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
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat
from millrace.compile.build import BuildOptions, BuildPlan, plan_engine
from millrace.compile.precision import StoredMatrix, nearest_precisions, precision_map, rounding_notes
from millrace.compile.source import Source
from millrace.kernels.matmul.pack import hadamard
from millrace.kernels.operand_places import PackedPlace
from millrace.kernels.precision import Precision
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf

PANEL = 32
Blocks = tuple[NDArray[np.integer[Any]], NDArray[np.float16]]  # codes (N, K), scales (N, K/32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=4, **BLOCKY)


def plan(path: Path, precision: str | None = None, group: int | None = None, head: str | None = None) -> BuildPlan:
    """group: asked for; None: nobody asks, so what the file holds keeps its own"""
    asked = precision_map(precision, group or 32, head, stored_groups=group is None) if precision else None
    options = BuildOptions(precision=asked)
    return plan_engine(Source.from_checkpoint(Checkpoint.open(path)), options)


def rounded(made: BuildPlan) -> list[str]:
    return [note for note in made.notes if "rounded again" in note]


def unpacked(packed: PackedPlace) -> Blocks:
    """Codes and scales out of the panels of 32 outputs that kernels read, in groups of 32 inputs."""
    bits = 4 if packed.format.startswith("w4") else 8
    N, K = packed.shape
    groups = packed.pack(map).reshape(-(-N // PANEL), K // 32, -1)  # panel, group, bytes
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
        (Kind.Q8_0, None), (Kind.Q4_0, "w4a16"),
        (Kind.Q4_0, "w8a8"),  # four bits fit into eight
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((Kind.Q4_0, None), (Kind.Q8_0, "w8a16"))),
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


def weights_in(packed: PackedPlace) -> NDArray[np.float32]:
    """(N, K) out of panels with minimums or in two levels, by the words of matmul/pack.py."""
    (N, K), panels = packed.shape, packed.pack(map).reshape(-(-packed.shape[0] // PANEL), -1)
    bits, group = int(packed.format[1]), int(packed.format.split()[0].split("g")[1])
    levels, minimums = "two levels" in packed.format, "minimums" in packed.format
    at, parts, upper = 0, [], []

    def take(n: int, dtype: str) -> NDArray[Any]:
        nonlocal at
        raw = np.ascontiguousarray(panels[:, at : at + n * np.dtype(dtype).itemsize])
        at += n * np.dtype(dtype).itemsize
        return raw.view(dtype).astype(np.float64).reshape(len(panels), -1, PANEL)  # panel, group, output

    for g in range(K // group):
        of_block = 256 // group
        if levels and g % of_block == 0:
            upper = [take(PANEL, "<f2") * take(PANEL * of_block, "i1") for _ in range(1 + minimums)]
        lines = take(PANEL * group * bits // 8, "u1").astype(np.uint8).reshape(len(panels), -1, PANEL, 4)
        codes = lines if bits == 8 else np.stack([lines & 15, lines >> 4], axis=2).reshape(len(panels), -1, PANEL, 4)
        rows = codes.transpose(0, 2, 1, 3).reshape(len(panels) * PANEL, group).astype(np.float64)
        zero = 128 if bits == 8 else 0
        kinds = [u[:, g % of_block] for u in upper] if levels else [take(PANEL, "<f2") for _ in range(1 + minimums)]
        scale, minimum = kinds[0].reshape(-1, 1), kinds[1].reshape(-1, 1) if minimums else 0
        parts.append(scale * (rows - zero) + minimum)
    assert at == panels.shape[1]
    return np.concatenate(parts, axis=1)[:N].astype(np.float32)


def dequantised(path: Path, origin: tuple[str, ...]) -> NDArray[np.float32]:
    """By the gguf package, of the layers of a packed matrix, in its order."""
    tensors, parts = {t.name: t for t in gguf.GGUFReader(path).tensors}, []
    for name in origin:
        tensor = tensors[gguf_name(name)]
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts.append(rows[original_rows(len(rows))] if "q_proj" in name or "k_proj" in name else rows)
    if "gate_proj" in origin[0]:
        return np.stack([p.reshape(-1, 16, p.shape[1]) for p in parts], 1).reshape(-1, parts[0].shape[1])
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("kind", "precision", "format"),
    [
        (Kind.Q4_1, None, "w4g32 with minimums"), (Kind.Q5_1, None, "w8g32 with minimums"),
        (Kind.Q4_K, "w8a16", "w8g32 in two levels with minimums"), (Kind.Q6_K, None, "w8g16 in two levels"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
            (Kind.Q4_1, "w4a16", "w4g32 with minimums"), (Kind.Q4_1, "w8a8", "w8g32 with minimums"),
            (Kind.Q4_K, None, "w4g32 in two levels with minimums"),
            (Kind.Q5_K, None, "w8g32 in two levels with minimums"), (Kind.Q6_K, "w8a16", "w8g16 in two levels"),
        )),
    ],
)  # fmt: skip
def test_minimums_and_levels_are_the_files(
    tmp_path: Path, folder: Path, kind: Kind, precision: str | None, format: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, kind)
    made = plan(path, precision)
    matrices = [w for w in made.program.weights if w.format.startswith("w")]
    assert {len(w.origin) for w in matrices} == {1, 2, 3}
    assert {w.format for w in matrices if "lm_head" not in w.name} == {format}
    for packed in matrices:
        assert packed.pack(map).nbytes == packed.nbytes
        np.testing.assert_array_equal(weights_in(packed), dequantised(path, packed.origin), err_msg=packed.name)
    assert rounded(made) == [], "nothing is"
    assert any("kept exactly, their codes in eight bits" in n for n in made.notes) == (
        kind not in (Kind.Q4_1, Kind.Q4_K)
    )


def test_a_mixture_keeps_all(tmp_path: Path, folder: Path) -> None:
    """q and k in Q4_0 beside v in Q4_1, gate in Q4_K beside up in Q4_1: products of their own, nothing rounded."""
    kinds = {"attn_v": Kind.Q4_1, "ffn_gate": Kind.Q4_K, "ffn_up": Kind.Q4_1}
    path = write_gguf(
        tmp_path / "m.gguf", folder, lambda n: next((k for name, k in kinds.items() if name in n), Kind.Q4_0)
    )
    made = plan(path)
    assert rounded(made) == [] and made.precision.default == Precision.W4A8
    matrices = [w for w in made.program.weights if w.format.startswith("w4")]
    assert {len(w.origin) for w in matrices} == {1, 2}, "q and k together"
    for packed in matrices:
        if packed.format == "w4g32":
            np.testing.assert_array_equal(unpacked(packed)[0], expected(path, packed.origin)[0], err_msg=packed.name)
        else:
            np.testing.assert_array_equal(weights_in(packed), dequantised(path, packed.origin), err_msg=packed.name)


def test_alike_but_for_their_bits_are_one_product(tmp_path: Path, folder: Path) -> None:
    """Q4_K and Q5_K in eight bits; of a mixture of symmetric types, what is kept and what is rounded stand apart."""
    kinds = {"attn_v": Kind.Q5_K, "ffn_up": Kind.Q5_K}
    path = write_gguf(
        tmp_path / "m.gguf", folder, lambda n: next((k for name, k in kinds.items() if name in n), Kind.Q4_K)
    )
    made = plan(path, "w8a8")
    matrices = [w for w in made.program.weights if w.format.startswith("w")]
    assert {len(w.origin) for w in matrices} == {1, 2, 3} and rounded(made) == []
    for packed in matrices:
        np.testing.assert_array_equal(weights_in(packed), dequantised(path, packed.origin), err_msg=packed.name)
    path = write_gguf(tmp_path / "s.gguf", folder, lambda n: Kind.Q5_0 if "attn_v" in n else Kind.Q4_0)
    made = plan(path, "w4a8")
    assert len(rounded(made)) == 1 and "2 of 15 matrices are stored as Q5_0" in rounded(made)[0]
    both = next(w for w in made.program.weights if "q_proj" in w.origin[0])
    np.testing.assert_array_equal(unpacked(both)[0], expected(path, both.origin)[0])
    again = next(w for w in made.program.weights if "v_proj" in w.origin[0])
    assert len(both.origin) == 2 and (again.origin[1:], again.format) == ((), "w4g32 by Hadamard")
    codes, scales = unpacked(again)
    wide = np.repeat(scales.astype(np.float64), 32, axis=1)
    exact = hadamard(dequantised(path, again.origin), 32).astype(np.float64)
    assert (np.abs(codes * wide - exact) <= 1.01 * np.abs(wide)).all()


def test_a_head_in_two_steps(tmp_path: Path, folder: Path) -> None:
    """Four bits that are the file's own need no second step; else the likeliest come again from eight bits."""
    for head, steps in ((Kind.Q4_1, 0), (Kind.Q4_K, 0), (Kind.Q5_1, 1), (Kind.Q6_K, 1), (Kind.F32, 1)):
        path = write_gguf(
            tmp_path / "m.gguf",
            folder,
            lambda n, head=head: head if n == "output.weight" else Kind.Q4_1,  # type: ignore[misc]
        )
        made = plan(path, "w4a8", head="w4a8")
        assert [c.kernel for c in made.program.calls].count("rescore") == steps, head
        for packed in made.program.weights:
            assert packed.pack(map).nbytes == packed.nbytes


def test_a_head_that_nobody_named_keeps_its_codes(tmp_path: Path, folder: Path) -> None:
    """In the precision of the layers where that holds them, else in eight bits."""
    for head, kept in ((Kind.Q4_1, "w4g32 with minimums"), (Kind.Q8_0, "w8g32"), (Kind.F32, "w8g32 by Hadamard")):
        path = write_gguf(
            tmp_path / "m.gguf",
            folder,
            lambda n, head=head: head if n == "output.weight" else Kind.Q4_1,  # type: ignore[misc]
        )
        made = plan(path, "w4a8")
        (found,) = [w for w in made.program.weights if w.origin == ("lm_head.weight",)]
        assert found.format == kept and rounded(made) == []
        assert made.precision.described("lm_head").get("lm_head") == (None if kept.startswith("w4") else "w8a8")


def test_other_groups_are_rounded_again_and_said(tmp_path: Path, folder: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, Kind.Q6_K)  # of 16: those that were asked for are others
    assert "groups of 32" in plan(path, "w8a8", 32).notes[0] and not rounded(plan(path, "w8a8", 16))
    path = write_gguf(tmp_path / "m.gguf", folder, Kind.Q4_0)
    assert "groups of 128" in plan(path, "w4a8", 128).notes[0]
    assert plan(path, "fp32").notes == () and "bf16" in plan(path, "bf16").notes[0]


KINDS: list[tuple[Kind | Callable[[str], Kind], str, dict[str, str], int]] = [
    (Kind.F32, "fp32", {}, 128),
    (Kind.F16, "fp32", {}, 128),
    (Kind.BF16, "bf16", {}, 128),
    (Kind.Q4_0, "w4a8", {"lm_head": "w4a8"}, 32),
    (Kind.Q4_1, "w4a8", {"lm_head": "w4a8"}, 32),
    (Kind.Q4_K, "w4a8", {"lm_head": "w4a8"}, 32),
    (Kind.Q5_1, "w8a8", {}, 32),
    (Kind.Q5_K, "w8a8", {}, 32),
    (Kind.Q6_K, "w8a8", {}, 32),
    (Kind.Q8_0, "w8a8", {}, 32),
    (lambda name: Kind.Q6_K if name == "output.weight" else Kind.Q4_0, "w4a8", {}, 32),  # a head has eight bits
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
    assert rounded(made) == [] and made.precision.precision_of("lm_head", is_head=True) == Precision.W8A8
    np.testing.assert_array_equal(unpacked(head)[0], in_file(path, "token_embd.weight")[0])


def test_a_mixture_by_layers() -> None:
    four, six = QuantisedFormat(4, 32), QuantisedFormat(6, 16, two_levels=True)
    sizes = {"a.down": ("q4_0", 10, four), "b.down": ("q6_k", 10, six), "c": ("q4_0", 5, four)}
    stored = {name: StoredMatrix(*matrix) for name, matrix in sizes.items()}
    chosen = nearest_precisions(stored)
    assert (chosen.default.value, [n for n, _ in chosen.patterns]) == ("w4a8", ["b.down"])
    (note,) = rounding_notes(stored, chosen)
    assert "1 of 3 matrices are stored as Q6_K and kept exactly" in note


@pytest.mark.parametrize(
    ("asked", "group", "said"),
    [
        ("w4a8", None, "; w8a8 would keep them exactly"),
        ("w8a8", 128, "; w8a8 without --group would keep them exactly"),
        ("w8a8", 32, None), ("w8a8", None, None), ("bf16", None, "(16-bit floats)"), ("fp32", None, None),
    ],
)  # fmt: skip
def test_notes_say_what_would_be_exact(asked: str, group: int | None, said: str | None) -> None:
    matrix = StoredMatrix("q5_1", 10, QuantisedFormat(5, 32, minimums=True))
    notes = rounding_notes({"a": matrix}, precision_map(asked, group or 32, stored_groups=group is None))
    again = [n for n in notes if "rounded again" in n]
    assert [n.endswith(said) for n in again if said] == ([True] if said else []) and len(again) == bool(said)
