"""Networks of any shapes and types: symbols in every dimension, broadcasting, transposes, beside PyTorch and NumPy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.nn import functional

from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.passes.pipeline import run_passes, unfused
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import read_graph_table
from millrace.engine.artifact.manifest import contradiction
from millrace.engine.cache_specs import KvFormat
from millrace.engine.reference.interpreter import Interpreter
from millrace.errors import ConfigError, GraphError, RequestError
from millrace.graph.dims import divide, parse_dim
from millrace.graph.types import DType
from millrace.kernels.catalogue import operators
from millrace.kernels.library import usable_isas
from millrace.model import ops
from millrace.model.layers import Conv2d
from millrace.model.module import Module, Parameter, Signature, Table, trace_model
from millrace.model.tensor import Tensor

Arrays = Mapping[str, np.ndarray[Any, Any]]
IMAGES = {"N": Bounds(1, 2, 3), "H": Bounds(4, 8, 12), "W": Bounds(3, 8, 10)}


class Masked(Module):
    """Planes of any number and size: convolution, ReLU, channels last, one row a pixel, a bias, a mask."""

    signature = Signature(
        {"pixels": ("N", 3, "H", "W"), "mask": ("N", "H*W", 1)}, ("scores", "halves"), {"mask": DType.BOOL}
    )

    def __init__(self) -> None:
        self.conv, self.bias = Conv2d(3, 20, 3, padding=1), Parameter(20)
        self.down = Conv2d(20, 4, 3, stride=2, padding=1)

    def forward(self, pixels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        n, _, h, w = pixels.shape
        x = ops.relu(self.conv(pixels))  # (N, 20, H, W)
        rows = x.transpose(0, 2, 3, 1).reshape(n, h * w, 20)
        return ops.where(mask, rows + self.bias, -1.0), ops.max_pool(self.down(x), 2, stride=1)


def engine_of(model: Module, out: Path, profile: Mapping[str, Bounds], weights: Any = None, **options: Any) -> Engine:
    source = Source.from_module(model, {} if weights is None else weights)
    asked = BuildOptions(precision=precision_map("fp32"), profile=profile, **options)
    write_engine(source, plan_engine(source, asked), out, name="shapes")
    return Engine.open(out)


def reference(model: Module, inputs: Arrays, weights: Any = None) -> dict[str, Any]:
    source = Source.from_module(model, {} if weights is None else weights)
    graph = run_passes(
        trace_model(source.module, source.weights, operators()), unfused(precision_map("fp32"))
    )  # before any pass but the choice of precision
    return Interpreter(graph, kv=KvFormat.F32, bf16_table=False).run(inputs)


def weights_of(model: Module, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {name: [d for d in p.shape if isinstance(d, int)] for name, p in model.parameters()}
    return {name: rng.uniform(-0.4, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def images(n: int, h: int, w: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, h, w])
    pixels = rng.standard_normal((n, 3, h, w)).astype(np.float32)
    return {"pixels": pixels, "mask": rng.random((n, h * w, 1)) < 0.7}


def by_pytorch(inputs: Arrays, weights: Any) -> tuple[Any, Any]:
    given = {name: torch.from_numpy(a).double() for name, a in weights.items()}
    x = torch.from_numpy(inputs["pixels"]).double()
    x = functional.conv2d(x, given["conv.weight"], given["conv.bias"], padding=1).relu()
    rows = x.permute(0, 2, 3, 1).reshape(len(x), -1, 20) + given["bias"]
    down = functional.conv2d(x, given["down.weight"], given["down.bias"], stride=2, padding=1)
    scores = torch.where(torch.from_numpy(inputs["mask"]), rows, -1.0)
    return scores.numpy(), functional.max_pool2d(down, 2, 1).numpy()


def test_symbols_in_any_dimension(tmp_path: Path) -> None:
    """As PyTorch at several sizes, and of the same bits on every instruction set and any number of threads."""
    weights = weights_of(Masked())
    engine = engine_of(Masked(), tmp_path / "e", IMAGES, weights)
    assert [s.shape for s in engine.manifest.cpu.outputs] == [["N", "H*W", 20], ["N", 4, "(H - 1)//2", "(W - 1)//2"]]
    shapes = [shape for node in read_graph_table(engine.folder).nodes for shape in node.shapes]
    assert ["N", "H*W", 20] in shapes and ["N", 4, "(H + 1)//2", "(W + 1)//2"] in shapes
    loaded = {(isa, n): engine.stateless_executor(isa=isa, threads=n) for isa in usable_isas() for n in (1, 2)}
    for sizes in ((1, 4, 3), (3, 12, 10), (2, 5, 8)):
        inputs = images(*sizes)
        found = [network.run(inputs) for network in loaded.values()]
        assert len({f["scores"].tobytes() + f["halves"].tobytes() for f in found}) == 1
        plain = reference(Masked(), inputs, weights)
        for name, exact in zip(("scores", "halves"), by_pytorch(inputs, weights), strict=True):
            got = found[0][name].astype(np.float64)
            assert got.shape == exact.shape == plain[name].shape
            assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()
            assert np.abs(plain[name] - exact).max() < 1e-6 * np.abs(exact).max()
    for network in loaded.values():
        network.close()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pixels": np.zeros((1, 3, 13, 4), np.float32)}, "H from 1 to 12"),
    (
        {"mask": np.zeros((1, 13, 1), bool)},
        "expected: bool[1, 12, 1], as [N, H*W, 1] where N = 1, H = 4, W = 3",
    ),
    ({"mask": np.zeros((2, 12, 1), bool)}, "mask is bool[2, 12, 1]"),
    ({"mask": np.zeros((1, 12, 1), np.int8)}, "mask is int8[1, 12, 1]"),
    ({"pixels": np.zeros((1, 3, 1, 4), np.float32), "mask": np.zeros((1, 4, 1), bool)}, "(H - 1)//2 is 0 where H = 1"),
]


def test_inputs_that_contradict_each_other(tmp_path: Path) -> None:
    loaded = engine_of(Masked(), tmp_path / "e", IMAGES, weights_of(Masked())).stateless_executor()
    for changed, says in WRONG:
        with pytest.raises(RequestError) as error:
            loaded.run({**images(1, 4, 3), **changed})
        assert says in str(error.value)
    assert np.isfinite(loaded.run(images(1, 4, 3))["scores"]).all()
    loaded.close()


class Rows(Module):
    """x (N, W) as rows of half the width; also a network whose sizes are all fixed."""

    signature = Signature({"x": ("N", "W")}, ("y",))

    def forward(self, x: Tensor) -> Tensor:
        n, w = x.shape
        return (x + 1.0).reshape(2 * n, divide(w, 2)) * 2.0


def test_quotients_are_exact(tmp_path: Path) -> None:
    """What is no whole number is said: of bounds when it is built, of inputs when it runs."""
    loaded = engine_of(Rows(), tmp_path / "e", {"N": Bounds(1, 1, 3), "W": Bounds(2, 4, 9999 + 1)}).stateless_executor()
    x = np.arange(6000, dtype=np.float32).reshape(3, 2000)
    assert (loaded.run({"x": x})["y"] == (x.reshape(6, 1000) + 1) * 2).all()
    with pytest.raises(RequestError, match=r"the dimension W/2 is no whole number where W = 7"):
        loaded.run({"x": x[:, :7]})
    loaded.close()
    with pytest.raises(ConfigError, match="the dimension W/2 is not an integer for W = 5"):
        engine_of(Rows(), tmp_path / "f", {"N": Bounds(1, 1, 3), "W": Bounds(2, 5, 10)})
    with pytest.raises(ConfigError, match=r"up to N\*W = 281,474,976,710,656 elements"):
        engine_of(Rows(), tmp_path / "f", dict.fromkeys("NW", Bounds(2, 2, 2**24)))


TEXTS = ["N", "H*N/2", "2*(H - 2)", "(H + 1)//2", "N/(2*H*W)", "3*((H + 1)//2)/W", "(3*H/W - 1)//2", "H//3"]


def test_dimensions_have_one_form() -> None:
    n, h = parse_dim("N"), parse_dim("H")
    assert [repr(parse_dim(text)) for text in TEXTS] == TEXTS
    assert n * h / 2 == h * n // 2 == parse_dim("2*N*H/(2*2)") and (n * h) / h == n and (4 * n) / (2 * n) == 2
    for text, same in (("((H + 1)//2 + 1)//2", "(H + 3)//4"), ("(4*H + 3)//2", "2*H + 1"), ("(2*H - 4)/2", "H - 2")):
        assert parse_dim(text) == parse_dim(same)
    for text in ("", "N +", "3N", "N**2", "N//0", "N/0", "(" * 30 + "N" + ")" * 30, "N M", "N" * 300, "N/(0*H)"):
        with pytest.raises(GraphError, match="dimension"):
            parse_dim(text)


@pytest.mark.parametrize(("shape", "why"), [
    (["N", "0 - 5"], "the dimension -5, which may be less than 1"), (["0*N"], "which may be less than 1"),
    (["N", "W - 4"], "the dimension W - 4, which may be less than 1"), (["N/(0*W)"], "divided by 0"),
])  # fmt: skip
def test_a_manifest_of_impossible_shapes(tmp_path: Path, shape: list[str], why: str) -> None:
    engine = engine_of(Rows(), tmp_path / "e", {"N": Bounds(1, 1, 3), "W": Bounds(2, 4, 8)})
    (y,), cpu = engine.manifest.cpu.outputs, engine.manifest.cpu
    bad = structs.replace(engine.manifest, cpu=structs.replace(cpu, outputs=[structs.replace(y, shape=shape)]))
    assert why in contradiction(bad) and not contradiction(engine.manifest)


# ---------------------------------------------------------------- types


class Typed(Module):
    """Every type in and out, and constants of them."""

    signature = Signature(
        {"x": ("n", 5), "h": ("n", 5), "b": ("n", 5), "i": ("n", 5), "l": ("n", 5), "m": ("n", 1)},
        ("sum", "half", "bytes", "long", "flags", "chosen", "back"),
        {"h": DType.F16, "b": DType.I8, "i": DType.I32, "l": DType.I64, "m": DType.BOOL},
    )

    def __init__(self) -> None:
        self.steps = Table((5,), lambda: np.array([1, 2**40, -3, 4, 2**62]), DType.I64)
        self.flags = Table((5,), lambda: np.array([True, False, True, True, False]), DType.BOOL)

    def forward(self, x: Tensor, h: Tensor, b: Tensor, i: Tensor, l: Tensor, m: Tensor) -> tuple[Tensor, ...]:  # noqa: E741
        long = l * 3.0 + self.steps
        flags = ops.maximum(ops.less(i, b), ops.minimum(m, self.flags))
        chosen = ops.where(flags, h, b)
        return x + h, h * h + 1.0, b + b, long, flags, chosen, ops.cast(x * 10.0, DType.I8)


def typed_inputs(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    return {
        "x": rng.normal(0, 4, (n, 5)).astype(np.float32), "h": rng.normal(0, 3, (n, 5)).astype(np.float16),
        "b": rng.integers(-128, 128, (n, 5)).astype(np.int8), "i": rng.integers(-99, 99, (n, 5)).astype(np.int32),
        "l": rng.integers(-(2**61), 2**61, (n, 5)), "m": rng.random((n, 1)) < 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("fuse", [True, False])
def test_values_of_every_type(fuse: bool, tmp_path: Path) -> None:
    engine, inputs = engine_of(Typed(), tmp_path / "e", {"n": Bounds(1, 4, 300)}, fuse=fuse), typed_inputs(300)
    x, h, b, i, l, m = inputs.values()  # noqa: E741
    steps, set_flags = Typed().steps.compute(), Typed().flags.compute()
    flags = (i < b) | (m & set_flags)
    with np.errstate(over="ignore"):
        exact = {
            "sum": x + h.astype(np.float32), "half": (h.astype(np.float32) ** 2 + 1).astype(np.float16), "bytes": b + b,
            "long": l * 3 + steps, "flags": flags, "chosen": np.where(flags, h, b.astype(np.float16)),
            "back": (x * 10).clip(-128, 127).astype(np.int8),
        }  # fmt: skip
    assert [s.dtype for s in engine.manifest.cpu.outputs] == ["f32", "f16", "i8", "i64", "bool", "f16", "i8"]
    plain = reference(Typed(), inputs)
    for isa in usable_isas():
        loaded = engine.stateless_executor(isa=isa)
        found: dict[str, Any] = loaded.run(inputs)
        for name, got in found.items():
            assert got.dtype == exact[name].dtype, name
            np.testing.assert_allclose(got, exact[name], rtol=1e-3 if name == "half" else 0, err_msg=name)
            np.testing.assert_allclose(plain[name], exact[name], rtol=1e-3, err_msg=name)
        loaded.close()


REFUSED: list[tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = [
    (lambda x, i, m: m + m, "add of bool"),
    (lambda x, i, m: ops.where(i, x, x), "its condition is i64"),
    (lambda x, i, m: i + 2.0**30, "1073741824 among whole numbers"),
    (lambda x, i, m: ops.cast(x, "f64"), "f64"),
    (lambda x, i, m: ops.softmax(i), "softmax: its input 1 is i64"),
    (lambda x, i, m: x.transpose(0, 0), r"each of 0 to 1 once"),
    (lambda x, i, m: x.reshape(x.shape[0], 7), r"\[n, 6\] to \[n, 7\]"),
    (lambda x, i, m: x + x.transpose(1, 0), "equal shapes, or 1"),
    (lambda x, i, m: ops.batched_matmul(x, x), "batched_matmul"),
]


@pytest.mark.parametrize(("forward", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_types_and_shapes_refuse(forward: Callable[..., Tensor], says: str) -> None:
    class One(Module):
        signature = Signature({"x": ("n", 6), "i": ("n", 6), "m": ("n", 6)}, ("y",), {"i": DType.I64, "m": DType.BOOL})

        def forward(self, x: Tensor, i: Tensor, m: Tensor) -> Tensor:
            return forward(x, i, m)

    source = Source.from_module(One(), {})
    with pytest.raises(GraphError, match=says):
        plan_engine(source, BuildOptions(profile={"n": Bounds(1, 1, 2)}))
