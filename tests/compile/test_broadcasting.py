"""Expressions of random shapes and types, native beside NumPy; attention spelled out of plain operators."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.compile.lower_cpu.program import Bounds
from millrace.errors import GraphError
from millrace.graph.dims import value_of
from millrace.graph.expression_types import is_integer, type_of
from millrace.graph.expressions import COMPARISONS, WHERE, Tree, evaluate
from millrace.graph.types import NUMPY, Dim, DType, Symbol
from millrace.kernels.library import usable_isas
from millrace.model import ops
from millrace.model.layers import Linear
from millrace.model.module import Module, Parameter, Signature
from millrace.model.tensor import Tensor
from tests.compile.test_shapes import engine_of, reference, weights_of

SIZES = {Symbol("A"): 3, Symbol("B"): 17, Symbol("C"): 5}
BOUNDS = {s.name: Bounds(1, n, 60) for s, n in SIZES.items()}


def random_shapes(rng: np.random.Generator, n: int) -> list[tuple[Dim, ...]]:
    """Of n operands of ranks up to 5 that broadcast; the first has all symbols, so that a run knows them."""
    dims: list[Dim] = [*SIZES, int(rng.choice([1, 2, 40])), int(rng.integers(1, 4))]
    rng.shuffle(dims)
    shapes: list[tuple[Dim, ...]] = [tuple(dims)]
    for _ in range(n - 1):
        kept = dims[int(rng.integers(0, 6)) :]
        shapes.append(tuple(1 if rng.random() < 0.4 else d for d in kept))
    return shapes


def random_tree(rng: np.random.Generator, types: list[DType]) -> Tree:
    """Of a few operations, such that its types are legal."""
    trees: list[Tree] = [*range(len(types)), 2.0, -3.0, *([0.5] if rng.random() < 0.5 else [])]
    while len(trees) < len(types) + 8:
        op = str(rng.choice(["add", "sub", "mul", "max", "min", *COMPARISONS, WHERE, "neg", "abs", "sigmoid"]))
        n = 3 if op == WHERE else 1 if op in ("neg", "abs", "sigmoid") else 2
        parts = [trees[int(i)] for i in rng.integers(0, len(trees), n)]
        bools = [i for i, t in enumerate(trees) if not isinstance(t, float) and type_of(t, types) == DType.BOOL]
        if op == WHERE and not bools:
            continue
        if op == WHERE:
            parts[0] = trees[bools[int(rng.integers(0, len(bools)))]]
        kinds = {type_of(t, types) for t in parts if not isinstance(t, float)}
        if all(isinstance(t, float) for t in parts) or (kinds == {DType.BOOL} and op not in ("max", "min", WHERE)):
            continue
        trees.append((op, *parts))
    return trees[-1]


@pytest.mark.parametrize("seed", range(16))
def test_random_expressions(seed: int, tmp_path: Path) -> None:
    """Whole numbers exactly; floats within their rounding, and of the same bits on every instruction set."""
    rng = np.random.default_rng([46, seed])
    types = [list(DType)[int(i)] for i in rng.integers(0, len(DType), int(rng.integers(1, 5)))]
    shapes, tree = random_shapes(rng, len(types)), random_tree(rng, types)

    class Expression(Module):
        signature = Signature(
            {f"x{i}": shape for i, shape in enumerate(shapes)}, ("y",), {f"x{i}": t for i, t in enumerate(types)}
        )

        def forward(self, *inputs: Tensor) -> Tensor:
            return inputs[0].trace.add("elementwise", inputs, {"tree": tree})

    sized = [tuple(value_of(d, SIZES) for d in shape) for shape in shapes]
    inputs = {
        f"x{i}": (rng.integers(0, 2, s) if t == DType.BOOL else rng.integers(-9, 10, s)).astype(NUMPY[t])
        for i, (s, t) in enumerate(zip(sized, types, strict=True))
    }  # fmt: skip
    arrays = [a.astype(np.int64 if is_integer(tree, types) else np.float64) for a in inputs.values()]
    exact = np.broadcast_to(evaluate(tree, arrays), np.broadcast_shapes(*sized))
    engine, seen = engine_of(Expression(), tmp_path / "e", BOUNDS), set()
    plain = reference(Expression(), inputs)["y"]
    for isa in usable_isas():
        loaded = engine.stateless_executor(isa=isa)
        got: Any = loaded.run(inputs)["y"]
        loaded.close()
        seen.add(got.tobytes())
        assert got.dtype == NUMPY[type_of(tree, types)] and got.shape == exact.shape == plain.shape
        stored = exact if got.dtype.kind == "f" else exact.astype(got.dtype)
        rounding = {np.dtype(np.float16): 1e-3, np.dtype(np.float32): 1e-5}.get(got.dtype, 0)
        for found in (got, plain):
            np.testing.assert_allclose(found, stored, rtol=rounding, atol=rounding, err_msg=f"{tree} of {types}")
    assert len(seen) == 1, "bits differ by instruction set"


def test_divisions_of_whole_numbers(tmp_path: Path) -> None:
    """Towards 0, as in C; what is divided by 0 is 0. Sums wrap."""

    class Divided(Module):
        signature = Signature({"x": ("n",), "y": ("n",)}, ("z", "sum"), dict.fromkeys("xy", DType.I64))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x / y, x + y

    x = np.array([7, -7, 7, -7, 5, -(2**63), 2**63 - 1], np.int64)
    y = np.array([2, 2, -2, -2, 0, -1, 2**62], np.int64)
    loaded = engine_of(Divided(), tmp_path / "e", {"n": Bounds(1, 4, 99)}).stateless_executor()
    found = loaded.run({"x": x, "y": y})
    assert found["z"].tolist() == [3, -3, -3, 3, 0, -(2**63), 1]
    with np.errstate(over="ignore"):
        assert (found["sum"] == x + y).all()
    loaded.close()


def test_halves_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    """Every binary16 there and back, and numbers between two of them: as NumPy."""

    class Halves(Module):
        signature = Signature({"x": ("n",), "h": ("n",)}, ("y", "f"), {"h": DType.F16})

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return ops.cast(x, DType.F16), ops.cast(h, DType.F32)

    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = np.sort(np.abs(every[np.isfinite(every)].astype(np.float32)))
    between = np.concatenate([(numbers[1:] + numbers[:-1]) / 2, numbers * np.float32(1.0002), [1e6, -1e-9]])
    x = np.concatenate([between, -between, numbers, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    h = np.resize(every, len(x))
    engine = engine_of(Halves(), tmp_path / "e", {"n": Bounds(1, 4, len(x))})
    with np.errstate(over="ignore"):
        exact = x.astype(np.float16)
    for isa in usable_isas():
        loaded = engine.stateless_executor(isa=isa)
        found = loaded.run({"x": x, "h": h})
        loaded.close()
        np.testing.assert_array_equal(found["y"], exact)
        np.testing.assert_array_equal(found["f"], h.astype(np.float32))


def test_a_constant_where_values_are_computed(tmp_path: Path) -> None:
    """One error, which names it; nothing is built."""

    class Turned(Module):
        signature = Signature({"x": ("n", 8)}, ("y",))

        def __init__(self) -> None:
            self.w = Parameter(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return ops.batched_matmul(x, self.w.transpose(1, 0))

    with pytest.raises(GraphError, match=r"the constant w is read by an operator that takes computed values only"):
        engine_of(Turned(), tmp_path / "e", {"n": Bounds(1, 4, 9)}, weights_of(Turned(), seed=1))


# ---------------------------------------------------------------- attention

H, D = 3, 8


class SpelledOut(Module):
    """Multi-head attention with a mask for padding: no operator of it knows what attention is."""

    signature = Signature({"x": ("B", "L", H * D), "kept": ("B", 1, 1, "L")}, ("y",), {"kept": DType.BOOL})

    def __init__(self) -> None:
        self.q, self.k, self.v, self.o = (Linear(H * D, H * D, bias=True) for _ in range(4))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        b, l, _ = x.shape  # noqa: E741
        rows = x.reshape(b * l, H * D)
        q, k, v = (layer(rows).reshape(b, l, H, D).transpose(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        scores = ops.batched_matmul(q, k.transpose(0, 1, 3, 2)) * D**-0.5  # (B, H, L, L)
        weights = ops.softmax(ops.where(kept, scores, -1e9))
        mixed = ops.batched_matmul(weights, v).transpose(0, 2, 1, 3)
        return self.o(mixed.reshape(b * l, H * D)).reshape(b, l, H * D)


@pytest.mark.parametrize("fuse", [True, False])
def test_attention_spelled_out(fuse: bool, tmp_path: Path) -> None:
    """As torch.nn.MultiheadAttention, at several lengths; a sequence's bits are its own."""
    weights = weights_of(SpelledOut(), seed=5)
    profile = {"B": Bounds(1, 2, 4), "L": Bounds(1, 8, 33)}
    engine = engine_of(SpelledOut(), tmp_path / "e", profile, weights, fuse=fuse)
    theirs = torch.nn.MultiheadAttention(H * D, H, batch_first=True).double().eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.from_numpy(np.concatenate([weights[f"{n}.weight"] for n in "qkv"])))
        theirs.in_proj_bias.copy_(torch.from_numpy(np.concatenate([weights[f"{n}.bias"] for n in "qkv"])))
        theirs.out_proj.weight.copy_(torch.from_numpy(weights["o.weight"]))
        theirs.out_proj.bias.copy_(torch.from_numpy(weights["o.bias"]))
    loaded = [engine.stateless_executor(isa=isa) for isa in usable_isas()]
    for b, l in ((1, 1), (2, 7), (4, 33)):  # noqa: E741
        rng = np.random.default_rng([b, l])
        x = rng.standard_normal((b, l, H * D)).astype(np.float32)
        kept = rng.random((b, 1, 1, l)) < 0.8
        kept[..., 0] = True
        found: list[Any] = [network.run({"x": x, "kept": kept})["y"] for network in loaded]
        assert len({f.tobytes() for f in found}) == 1
        assert (loaded[0].run({"x": x[:1], "kept": kept[:1]})["y"] == found[0][:1]).all()
        given, hidden = torch.from_numpy(x).double(), torch.from_numpy(~kept[:, 0, 0])
        exact = theirs(given, given, given, key_padding_mask=hidden, need_weights=False)[0].detach().numpy()
        assert np.abs(found[0] - exact).max() < 1e-5 * np.abs(exact).max()
        plain = reference(SpelledOut(), {"x": x, "kept": kept}, weights)["y"] if fuse else exact
        assert np.abs(plain - exact).max() < 1e-6 * np.abs(exact).max()
    for network in loaded:
        network.close()
