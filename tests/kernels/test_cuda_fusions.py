"""What lies between two products on a GPU: in Triton's interpreter, beside the references, at odd sizes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.lowered import Fusions
from millrace.kernels import torch_reference
from millrace.kernels.convert.ref import to_e4m3
from millrace.kernels.matmul.coded import AS_E4M3, Matrix, QuantizedRows, RowQuantization
from millrace.kernels.rms_norm.ref import rms_norm
from tests.engine.test_cuda import PROMPTS, both
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import prompts_as_step

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")
from millrace.kernels.convert.cuda import shape_of  # noqa: E402 (Triton's)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def drawn(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape) * 10.0 ** rng.integers(-2, 3, (shape[0], 1))).to(dtype)


CODINGS = [
    None,
    AS_E4M3,
    RowQuantization(e4m3=False, group=8, transform=True),
    RowQuantization(e4m3=False, group=24),
    RowQuantization(e4m3=False),
]


def named(coding: object) -> str:
    if not isinstance(coding, RowQuantization):
        return "floats"
    return "e4m3" if coding.e4m3 else f"int8 in {coding.group}{' transformed' if coding.transform else ''}"


def check_rows(y: Matrix, exact: NDArray[Any], dtype: torch.dtype, coding: RowQuantization | None) -> None:
    """exact: float64. Of codes: what those of its floats become; a float32 sum may fall to the other side of a step."""
    if coding is None:
        assert isinstance(y, Tensor) and y.dtype == dtype
        step = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        assert (np.abs(y.double().numpy() - exact) <= step * np.abs(exact) + 1e-7).all()
        return
    row = torch.bfloat16 if coding.e4m3 and dtype == torch.float32 else dtype
    rows = torch.from_numpy(exact).to(row)
    want = coding.rows(rows)
    assert isinstance(y, QuantizedRows) and y.codes.dtype == want.codes.dtype and y.scales.shape == want.scales.shape
    assert (y.width, y.group) == (want.width, want.group)
    scale, whole = want.scales.double().numpy(), want.dense().double().numpy()
    if coding.e4m3:
        whole = to_e4m3(rows.float().numpy()).astype(np.float64)
        step = np.abs(whole) / 7 + np.abs(exact).max(1, keepdims=True) * 2.0**-15
    else:
        step = 1.01 * scale.repeat(want.group, 1)[:, : want.width] + 1e-9
    far = np.abs(y.dense().double().numpy() - whole)
    near = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6}[row]  # the largest may be rounded otherwise
    if coding.transform and want.width % want.group and dtype == torch.bfloat16:
        assert (far <= step + np.abs(exact).max(1, keepdims=True) / 128).all()  # what lies between the interpreter cuts
        return
    assert (far <= step).all() and (far <= near * np.abs(whole) + 1e-9).mean() > 0.97


@pytest.mark.parametrize("kernels", [triton_kernels, torch_reference], ids=["triton", "plain"])
@pytest.mark.parametrize("coding", CODINGS, ids=named)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 40, pytest.param(257, marks=pytest.mark.nightly)])
def test_add_and_normalise(n: int, dtype: torch.dtype, coding: RowQuantization | None, kernels: object) -> None:
    rng = np.random.default_rng(n)
    x, residual = drawn(rng, 5, n, dtype=dtype), drawn(rng, 5, n)
    w = torch.from_numpy(rng.normal(size=n)).float()
    total, y = add_norm(kernels)(x, residual, w, EPS, dtype, coding)
    sums = x.double().numpy() + residual.double().numpy()
    np.testing.assert_allclose(total.numpy(), sums, rtol=1e-6)
    check_rows(y, rms_norm(sums, w.double().numpy(), EPS), dtype, coding)


@pytest.mark.parametrize("kernels", [triton_kernels, torch_reference], ids=["triton", "plain"])
@pytest.mark.parametrize("coding", CODINGS, ids=named)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 40, pytest.param(257, marks=pytest.mark.nightly)])
def test_silu_and_multiply(n: int, dtype: torch.dtype, coding: RowQuantization | None, kernels: object) -> None:
    """Halves of one array, as a product of both would give them: rows have a stride."""
    rng = np.random.default_rng(n)
    gate, up = drawn(rng, 5, 2 * n, dtype=dtype).chunk(2, 1)
    g, u = gate.double().numpy(), up.double().numpy()
    with np.errstate(over="ignore"):  # of what is far below zero: then it is zero
        exact = g / (1 + np.exp(-g)) * u
    check_rows(silu_mul(kernels)(gate, up, dtype, coding), exact, dtype, coding)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@pytest.mark.parametrize("kernels", [triton_kernels, torch_reference], ids=["triton", "plain"])
@pytest.mark.parametrize("coding", CODINGS, ids=named)
def test_rows_that_are_not_finite_stay_so(coding: RowQuantization | None, kernels: object) -> None:
    """And no row but theirs."""
    rng = np.random.default_rng(2)
    x, residual, w = drawn(rng, 3, 40), drawn(rng, 3, 40), torch.ones(40)
    x[1, 7], x[2, 39] = float("inf"), float("nan")
    with np.errstate(invalid="ignore"):  # the interpreter's own
        found = [
            add_norm(kernels)(x, residual, w, EPS, torch.float32, coding)[1],
            silu_mul(kernels)(x, residual, torch.float32, coding),
        ]
    for y in found:
        rows = y.dense() if isinstance(y, QuantizedRows) else y
        assert rows.isfinite().all(1).tolist() == [True, False, False]


def add_norm(kernels: object) -> Callable[..., tuple[Tensor, Matrix]]:
    return kernels.add_norm  # type: ignore[attr-defined,no-any-return]


def silu_mul(kernels: object) -> Callable[..., Matrix]:
    return kernels.silu_mul  # type: ignore[attr-defined,no-any-return]


def test_a_thread_has_what_its_registers_hold() -> None:
    """Of Llama's rows: 8B's have 14,336 elements, 70B's 28,672; a program has at most 1,024 threads."""
    assert [shape_of(n, AS_E4M3).warps for n in (64, 4096, 14336, 28672, 65536)] == [4, 4, 16, 32, 32]
    assert [shape_of(n, complete=True).warps for n in (4096, 8192)] == [4, 8]


@pytest.mark.parametrize("n", [1, 40, 4096, 4097, 14336, 28672])
@pytest.mark.parametrize("coding", CODINGS, ids=named)
def test_programs_have_all_of_a_row_once(n: int, coding: RowQuantization | None) -> None:
    """One has it where it has one scale, or is asked for whole; else parts of some thousands."""
    for whole in (False, True):
        shape = shape_of(n, coding, complete=whole)
        each = shape.sizes["GROUPS"] * shape.sizes["GROUP"]
        assert each * (shape.parts - 1) < n <= each * shape.parts
        alone = whole or (coding is not None and not coding.group)
        assert shape.parts == 1 if alone else each <= 2048


@pytest.mark.parametrize("precision", ["bf16", "fp8a16", "w8a8"])
def test_a_graph_has_them_where_they_are_neighbours(precision: str, tmp_path: Path) -> None:
    """Two layers: norms behind the first two products that are added, and behind the third one; the last is followed
    by the choice of rows. Rows of E4M3 are made at once where nobody else reads them."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=5)
    names = {o for node in both(folder, precision)[0]._loaded.coded for o in node.origin}
    executor = both(folder, precision, fp8_rows=names if precision == "fp8a16" else ())[0]
    origins = sorted(norm.origin[0] for norm in executor._lowered.fusions.norms.values())
    assert [o.removeprefix("model.layers.") for o in origins] == [
        "0.post_attention_layernorm", "1.input_layernorm", "1.post_attention_layernorm",
    ]  # fmt: skip
    made = executor._lowered.fusions.codings.values()
    assert len(made) == (5 if precision != "bf16" else 0) and all(c.e4m3 == (precision == "fp8a16") for c in made)
    step = prompts_as_step(PROMPTS)
    found = executor.logits(step).numpy()
    executor._lowered = replace(executor._lowered, fusions=Fusions({}, {}))
    apart = executor.logits(step).numpy()
    np.testing.assert_allclose(found, apart, atol=2e-6 * np.abs(apart).max() if precision == "fp8a16" else 0.02)


@pytest.mark.parametrize(("precision", "far"), [
    ("fp8a16", 1e-3), pytest.param("w8a8", 1e-2, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_model_through_the_interpreter(precision: str, far: float, tmp_path: Path) -> None:
    """All kernels of a step at once, over the executor's own tensors, beside plain PyTorch.

    far: in shares of the largest logit; of INT8 rows one may fall to the other side of a step"""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=6)
    coded = both(folder, precision)[0]._loaded.coded if precision == "fp8a16" else ()
    names = {o for node in coded for o in node.origin}
    executor = both(folder, precision, dtype="fp32", fp8_rows=names)[0]
    step = prompts_as_step([[5, 6, 7], [9]])
    want = executor.logits(step).numpy()
    executor._kernels = triton_kernels
    got = executor.logits(step).numpy()
    assert np.abs(got - want).max() <= far * np.abs(want).max()
