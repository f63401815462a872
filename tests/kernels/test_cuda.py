"""Triton's kernels in its interpreter, on odd sizes, beside the references; and compiled for a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.engine.cuda.attention_partition import AttentionKind, SmGeometry
from millrace.engine.cuda.device_roofline import _PRODUCTS
from millrace.engine.cuda.step_tables import step_tables
from millrace.engine.executor import StepInputs, plain_rows
from millrace.kernels import torch_reference
from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.attention.ref import ROUNDINGS, attention, transformed
from millrace.kernels.convert.ref import to_e4m3, to_q8
from millrace.kernels.matmul.coded import QuantizedRows, e4m3_rows, int8_rows, weights
from millrace.kernels.matmul.gpu_tiles import EIGHT, MANY_ROWS, takes, tiles
from millrace.kernels.matmul.pack import rounded_codes, rounded_e4m3
from millrace.kernels.operators import Rows
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.rope.ref import rope
from tests.kernels.test_gpu_launch import calls, jitted, overlaps
from tests.support.one_step import i32

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")
from millrace.kernels.matmul import cuda as products  # noqa: E402 (Triton's)
from millrace.kernels.matmul.cuda import block_k, scaled_mm_takes  # noqa: E402 (Triton's)

ONE_SCALE = "before torch 2.13 a CPU's _scaled_mm takes one scale"
PAGE = 64
# tokens before the step, tokens of it: a decode row, a chunk over a page's end, a prompt, one at a page's first place
STEPS = [(70, 1), (58, 9), (0, 5), (128, 1)]


def tables(processors: SmGeometry, group: int, rng: np.random.Generator) -> tuple[StepInputs, StepTables]:
    counts = [-(-(first + n) // PAGE) for first, n in STEPS]
    step = StepInputs(
        i32(range(sum(n for _, n in STEPS))), i32([first + i for first, n in STEPS for i in range(n)]),
        i32([0, *np.cumsum([n for _, n in STEPS])]), i32(rng.permutation(sum(counts) + 3)[: sum(counts)]),
        i32([0, *np.cumsum(counts)]), plain_rows(1), i32([]), i32([]), np.zeros(0, np.float32),
    )  # fmt: skip
    return step, step_tables(step, PAGE, torch.device("cpu"), AttentionKind(group, 1), processors)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size", "processors", "rotates", "kept"),
    [
        (4, 2, 16, 16, (1, 64), True, "f32"),
        pytest.param(6, 2, 24, 40, (2, 64), True, "f32", marks=pytest.mark.nightly),
        pytest.param(9, 3, 64, 64, (2, 128), True, "f32", marks=pytest.mark.nightly),
        pytest.param(3, 3, 8, 24, (9, 64), False, "f32", marks=pytest.mark.nightly),
        (6, 2, 24, 40, (2, 64), True, "int8"), (4, 2, 16, 24, (9, 128), True, "fp8"),
    ],
)  # fmt: skip
def test_attention_over_pages(
    heads: int, kv_heads: int, size: int, value_size: int, processors: tuple[int, int], rotates: bool, kept: str
) -> None:
    """What no token of a sequence has written is NaN: it must not be read. What is kept is as the reference rounds it,
    but where a float32 falls to the other side; attention is then that over what is kept."""
    rng = np.random.default_rng(heads)
    step, on_device = tables(SmGeometry(*processors), heads // kv_heads, rng)
    last = step.starts[-1]
    angles = rng.uniform(0, 7, (200, size // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    dtype = {"f32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kept]
    pages = LayerPages.empty((12, kv_heads, PAGE), (size, value_size), dtype, torch.device("cpu"))
    for x in (pages.key_scales, pages.value_scales) if pages.coded else (pages.keys, pages.values):
        x.fill_(float("nan"))
    qkv = torch.from_numpy(rng.normal(size=(last, heads * size + kv_heads * (size + value_size))).astype(np.float32))
    widths = heads * size, kv_heads * size, kv_heads * value_size
    q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(qkv.split(widths, 1), (size, size, value_size), strict=True))
    kept_before = [written(pages, step, s, rng) for s in range(len(STEPS))]
    rotated = triton_kernels.keep_rotated(
        (q, k, v), on_device, torch.from_numpy(table) if rotates else None, pages, torch.float32
    )
    y = triton_kernels.attention(rotated, on_device, pages, 0.3)
    for s, (first, n) in enumerate(STEPS):
        part = slice(step.starts[s], step.starts[s + 1])
        new = [x[part].double().numpy() for x in (q, k, v)]
        if rotates:
            new[:2] = (rope(x, step.positions[part], table.astype(np.float64)) for x in new[:2])
        if kept == "fp8":
            new[0] = transformed(new[0])
        np.testing.assert_allclose(rotated[part].numpy(), new[0], atol=1e-5)
        keys, values = stored(pages, step, s, first + n)
        for rows, before, x, code in zip((keys, values), kept_before[s], new[1:], ROUNDINGS[kept][1:], strict=True):
            np.testing.assert_array_equal(rows[:first], before)
            want, amax = code(x), np.abs(x).max(axis=2, keepdims=True)
            step_size = {"f32": 1e-6, "int8": amax / 126, "fp8": np.abs(want) / 7 + amax * 2.0**-15}[kept]
            assert (np.abs(rows[first:] - want) <= step_size + 1e-5).all()
            assert (np.abs(rows[first:] - want) <= 1e-5).mean() > 0.99
        np.testing.assert_allclose(y[part].numpy(), attention(new[0], keys, values, first, 0.3), atol=2e-5)


def stored(pages: LayerPages, step: StepInputs, s: int, n: int) -> list[Rows]:
    """Keys and values (n, K, size) of a sequence, as its pages have them."""
    own = torch.from_numpy(step.pages[step.page_starts[s] : step.page_starts[s + 1]])
    return [x.transpose(1, 2).flatten(0, 1)[:n].double().numpy() for x in pages.floats(own)]


def written(pages: LayerPages, step: StepInputs, s: int, rng: np.random.Generator) -> list[Rows]:
    """Random keys and values before the step's, in the sequence's pages, as these hold them."""
    first, own = STEPS[s][0], step.pages[step.page_starts[s] : step.page_starts[s + 1]]
    at = np.arange(first)
    page, place = torch.from_numpy(own[at // PAGE]).long(), torch.from_numpy(at % PAGE)
    for rows, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        x = torch.from_numpy(rng.normal(size=(first, rows.shape[1], rows.shape[3])).astype(np.float32))
        if pages.coded:
            x, scales[page, :, place] = torch_reference.coded(x, rows.dtype)
        rows[page, :, place] = x
    return stored(pages, step, s, first)


@pytest.mark.parametrize("n", [1, 40, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(n: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(n)
    x, w = rng.normal(size=(2, 3, n)), rng.normal(size=n)
    y = triton_kernels.rms_norm(torch.from_numpy(x).to(dtype), torch.from_numpy(w).float(), 1e-5, dtype)
    rounded = torch.from_numpy(x).to(dtype).double().numpy()
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    np.testing.assert_allclose(y.double().numpy(), rms_norm(rounded, w, 1e-5), atol=tolerance)


def coded_weights(kind: str, n: int, k: int, group: int, rng: np.random.Generator) -> QuantisedMatrix:
    w = rng.normal(size=(n, k)) * 10.0 ** rng.integers(-2, 3, (n, 1))
    if kind == "e4m3":
        return rounded_e4m3(w)
    bits, _, more = kind.partition(" ")
    codes = rounded_codes(w, int(bits), group)
    if not more:
        return codes
    positive = (codes.codes.astype(np.int16) + (8 if bits == "4" else 0)).astype(np.int8)
    return replace(codes, codes=positive, minimums=rng.normal(size=codes.scales.shape).astype(np.float16))


def coded_rows(kind: str, m: int, k: int, group: int, rng: np.random.Generator) -> tuple[Tensor | QuantizedRows, Rows]:
    """And what they stand for: as the references of convert have it."""
    x = rng.normal(size=(m, k)).astype(np.float16)
    given = torch.from_numpy(x)
    if kind == "e4m3":
        return e4m3_rows(given), to_e4m3(x.astype(np.float32)).astype(np.float64)
    if kind == "int8":
        return int8_rows(given, group), to_q8(x.astype(np.float32), group).dequantise()
    return given, x.astype(np.float64)


@pytest.mark.parametrize(
    ("m", "n", "k", "group"), [
        (1, 1, 4, 4), (3, 37, 131, 64), pytest.param(17, 70, 320, 128, marks=pytest.mark.nightly), (65, 48, 160, 32),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rows", "kind"), [
    ("float", "8"), ("float", "4"), ("float", "4 minimums"), ("float", "8 minimums"), ("float", "e4m3"),
    ("int8", "8"), ("int8", "4"), ("int8", "4 minimums"), ("e4m3", "e4m3"), ("e4m3", "4"),
])  # fmt: skip
def test_coded_products(rows: str, kind: str, m: int, n: int, k: int, group: int) -> None:
    """Beside float64 over the same codes, at odd sizes, groups that end early, and few rows and many."""
    rng = np.random.default_rng(k)
    matrix = coded_weights(kind, n, k, group, rng)
    w = weights(matrix)
    x, exact = coded_rows(rows, m, k, 32 if group % 32 == 0 else group, rng)
    bound = np.abs(exact) @ np.abs(matrix.dequantise()).T
    for kernels in (triton_kernels, torch_reference):
        y = kernels.product(x, w, torch.float32).double().numpy()
        by_floats = kernels is triton_kernels and rows == "float" and (m >= MANY_ROWS or not block_k(x, w))
        tolerance = 2.0**-11 if by_floats else 1e-5  # weights that were made float16
        assert (np.abs(y - exact @ matrix.dequantise().T) <= tolerance * bound + 1e-7).all(), kernels.__name__


@pytest.mark.parametrize(("rows", "kind"), [("float", "4 minimums"), ("int8", "8"), ("e4m3", "e4m3")])
@pytest.mark.parametrize("m", [3, *(pytest.param(m, marks=pytest.mark.nightly) for m in (40, 70))])
def test_every_tile_gives_the_same_products(rows: str, kind: str, m: int) -> None:
    """Tiles cut rows and columns differently, never what is summed along a row.

    On a device all bits are the same. Here the interpreter sums by NumPy's BLAS, whose order depends on the processor.
    """
    rng = np.random.default_rng(m)
    matrix = coded_weights(kind, 150, 192, 64, rng)
    w = weights(matrix)
    x, exact = coded_rows(rows, m, 192, 64, rng)
    found = [products.by_kernel(x, w, torch.float32, tile) for tile in tiles(m) if tile.rows > EIGHT]
    bound = torch.from_numpy(np.abs(exact) @ np.abs(matrix.dequantise()).T)
    assert len(found) >= 3 and all(((y - found[0]).abs() <= 1e-6 * bound).all() for y in found[1:])


@pytest.mark.parametrize(("n", "k"), [(1, 4), (7, 511), (5, 512), (9, 1025), (4, 2048), (3, 2500)])
def test_one_row_of_e4m3_by_every_tile(n: int, k: int) -> None:
    """Its own kernel's, around the ends of its blocks: what lies behind a row's end is another row, and not summed."""
    rng = np.random.default_rng(n)
    w = weights(coded_weights("e4m3", n, k, 0, rng))
    x, exact = coded_rows("e4m3", 1, k, 0, rng)
    assert isinstance(x, QuantizedRows)
    dense = w.dense().double().numpy()
    for tile in (tile for tile in tiles(1) if takes(tile, x, w)):
        y = products.by_kernel(x, w, torch.float32, tile).double().numpy()
        assert (np.abs(y - exact @ dense.T) <= 1e-6 * (np.abs(exact) @ np.abs(dense).T)).all(), tile
    assert products.product(replace(x, scales=x.scales * float("nan")), w, torch.bfloat16).isnan().all()


def test_each_half_of_a_word_is_exact() -> None:
    """All 16 codes in each of the 8 places of a word, met by rows of which one element is 1. Arithmetic in bfloat16 is
    none in the interpreter: there the power of two that they become the last bits of is looked at."""
    codes = np.stack([np.roll(np.arange(32) % 16, n) for n in range(16)]) - 8
    w = weights(QuantisedMatrix(codes.astype(np.int8), np.ones((16, 1), np.float16), 32, 4))
    x = torch.eye(32, dtype=torch.float16)
    assert products.by_words(x, w)
    assert products.product(x, w, torch.float32).T.tolist() == codes.tolist()
    for dtype, units, bits in (
        (torch.float16, products.UNITS_FP16, products.BITS_FP16),
        (torch.bfloat16, products.UNITS_BF16, products.BITS_BF16),
    ):
        pair = torch.tensor([bits.value], dtype=torch.int32).view(dtype)
        assert pair.tolist() == [units.value] * 2 and torch.finfo(dtype).eps * units.value == 1


def test_scales_in_two_levels_are_exact() -> None:
    """As files of llama.cpp have them: a float16 times an integer, for a group of 32."""
    rng = np.random.default_rng(4)
    matrix = QuantisedMatrix(
        rng.integers(0, 16, (3, 300)).astype(np.int8), rng.normal(size=(3, 2)).astype(np.float16), 32, 4,
        rng.normal(size=(3, 2)).astype(np.float16), *rng.integers(0, 64, (2, 3, 10)).astype(np.int8),
    )  # fmt: skip
    np.testing.assert_allclose(weights(matrix).dense(), matrix.dequantise(), rtol=1e-6, atol=1e-5)


def test_many_rows_of_e4m3_go_through_scaled_mm() -> None:
    """PyTorch's on a CPU is the same product; of bfloat16 it differs by its rounding from the kernel's."""
    if not torch.__version__ >= "2.13":
        pytest.skip(ONE_SCALE)
    rng = np.random.default_rng(1)
    w = weights(coded_weights("e4m3", 48, 160, 0, rng))
    x, exact = coded_rows("e4m3", 64, 160, 0, rng)
    assert isinstance(x, QuantizedRows) and scaled_mm_takes(x, w, torch.bfloat16)
    assert not scaled_mm_takes(x, w, torch.float32)
    y = triton_kernels.product(x, w, torch.bfloat16).double().numpy()
    want = exact @ w.dense().double().numpy().T
    assert (np.abs(y - want) <= np.abs(want) / 256 + 1e-5 * (np.abs(exact) @ np.abs(w.dense().numpy()).T)).all()


def test_what_scaled_mm_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PyTorch on a GPU: a product with sums of fast accumulation, the way that it has for a scale a row (ATen's
    ScaledBlas.cpp): rows one behind the other, columns too, scales (M, 1) and (1, N) in one piece. As its rate is."""
    asked: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []

    def product(*given: Tensor, **how: Any) -> Tensor:
        asked.append((given, how))
        return torch.zeros((len(given[0]), given[1].shape[1]), dtype=how["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", product)
    rng = np.random.default_rng(1)
    x, _ = coded_rows("e4m3", 70, 160, 0, rng)
    triton_kernels.product(x, weights(coded_weights("e4m3", 48, 160, 0, rng)), torch.bfloat16)
    _PRODUCTS["fp8"](torch.ones((32, 32)), torch.ones((32, 32)))()
    assert len(asked) == 2
    for (a, b), how in asked:
        assert how["use_fast_accum"] is True and how["out_dtype"] == torch.bfloat16
        assert a.is_contiguous() and b.t().is_contiguous() and a.dtype == b.dtype == torch.float8_e4m3fn
        assert how["scale_a"].is_contiguous() and how["scale_b"].is_contiguous()
        assert how["scale_a"].shape[1] == how["scale_b"].shape[0] == 1
        assert how["scale_a"].dtype == how["scale_b"].dtype == torch.float32
    assert asked[0][1]["scale_a"].shape == (70, 1) and asked[0][1]["scale_b"].shape == (1, 48)


@pytest.mark.parametrize("kind", ["float", "int8", "e4m3"])
def test_rows_that_are_not_finite_stay_so(kind: str) -> None:
    """And no row but theirs."""
    rng = np.random.default_rng(2)
    matrix = coded_weights("e4m3" if kind == "e4m3" else "8", 5, 64, 32, rng)
    x = torch.from_numpy(rng.normal(size=(3, 64)).astype(np.float16))
    x[1, 7], x[2, 3] = float("inf"), float("nan")
    rows = x if kind == "float" else int8_rows(x, 32) if kind == "int8" else e4m3_rows(x)
    for kernels in (triton_kernels, torch_reference):
        with np.errstate(invalid="ignore"):  # the interpreter's own products
            y = kernels.product(rows, weights(matrix), torch.float32)
        assert y.isfinite().all(1).tolist() == [True, False, False], kernels.__name__


def test_many_rows_meet_some_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose floats are there together only as far as SLAB allows."""
    rng = np.random.default_rng(2)
    matrix = weights(rounded_codes(rng.normal(size=(33, 48)).astype(np.float32), 4, 48))
    x = torch.from_numpy(rng.normal(size=(MANY_ROWS, 48)).astype(np.float32))
    whole = triton_kernels.product(x, matrix, torch.float32)
    monkeypatch.setattr(products, "SLAB", 5 * 48 + 1)
    torch.testing.assert_close(triton_kernels.product(x, matrix, torch.float32), whole)
    monkeypatch.setattr(products, "SLAB", 1)
    torch.testing.assert_close(triton_kernels.product(x, matrix, torch.float32), whole)


@pytest.mark.parametrize(("arch", "spilled", "most"), [
    *(pytest.param(*given, 99, marks=pytest.mark.nightly) for given in ((80, 0), (89, 16), (90, 0))), (90, 0, 1),
])  # fmt: skip
def test_they_compile_for_a_gpu(arch: int, spilled: int, most: int) -> None:
    """In a process of its own, which interprets nothing. Of an H200 none may spill; of others so many bytes at most.
    By day a case of each kernel.

    There those that may begin early wait before they touch memory, by what they compile to."""
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--arch", str(arch), "--json", "--no-tiles",
               "--most", str(most)]  # fmt: skip
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    found = json.loads(out.stdout)
    without_fp8 = {"one_row"} if arch < 89 else set()  # an A100 has no E4M3
    assert {row["kernel"] for row in found} | without_fp8 == {
        "add_normalise", "attend", "attend_texts", "best_rows", "code_rows", "coded_product", "convolve",
        "draw_rows", "few_rows_of_words", "gated", "keep_rows", "merge", "normalise", "one_row",
        "put_tokens", "rotate_and_keep",
    }  # fmt: skip
    early = {node.name for _, node in jitted() if overlaps(node)}
    asking = {node.name for _, node in jitted() if "asks_for" in calls(node)}
    for row in found:
        assert row["overlaps"] == (arch == 90 and row["kernel"] in early), row
        assert row["asks_ahead"] == (arch == 90 and row["kernel"] in asking), row
        assert row["spilled_bytes"] <= spilled and row["registers"] <= 255, row
        is_wide = row["about"].startswith("prompts, heads of 256")
        room = 227 if arch == 90 and is_wide else 99  # KiB: of an H200, of an L4
        assert row["shared_bytes"] <= room * 1024, row
    for row in found:
        least = {"one_row": 32, "few_rows_of_words": 48}.get(row["kernel"])  # KiB: 4.8 TB/s for some 0.9 us, by 132
        if arch == 90 and least is not None:
            resident = 65536 // (32 * row["warps"] * row["registers"])
            assert resident * row["under_way_bytes"] >= least << 10, row
        if arch == 90 and row["kernel"] == "few_rows_of_words":  # by 16 rows 860 of 128 halves a thread, 364 of 64 int8
            assert row["loop"] <= (240 if row["about"] == "w8a16" else 320), row
        if row["kernel"] == "coded_product" and "many" not in row["about"]:
            assert row["under_way_bytes"] >= 8 << 10, row
