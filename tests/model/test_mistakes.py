"""What the author of a network of one's own may get wrong: one error each, in the author's words."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.errors import ConfigError, GraphError
from millrace.model import ops
from millrace.model.layers import Linear
from millrace.model.module import Module, ModuleList, Signature
from millrace.model.tensor import Tensor

GOOD = {"a.weight": (24, 32), "b.weight": (5, 24)}


class Block(Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        self.a, self.b, self._forward = Linear(32, 24), Linear(24, 5), forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


class Net(Module):
    signature = Signature({"x": ("batch", 32)}, ("y",))

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        self.blocks = ModuleList([Block(forward)])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](x)


def right(block: Any, x: Tensor) -> Tensor:
    return block.b(ops.relu(block.a(x)))  # type: ignore[no-any-return]


def arrays(**changed: Any) -> dict[str, Any]:
    made = {f"blocks.0.{name}": np.ones(shape, np.float32) for name, shape in GOOD.items()}
    for name, value in changed.items():
        made.pop(f"blocks.0.{name}.weight", None)
        if value is not None:
            made[f"blocks.0.{name}.weight"] = value
    return made


def planned(forward: Callable[[Any, Tensor], Any] = right, weights: Any = None, profile: Any = None) -> Any:
    source = Source.from_module(Net(forward), arrays() if weights is None else weights, max_context=0)
    profile = {"batch": Bounds(1, 4, 8)} if profile is None else profile
    return source, plan_engine(source, BuildOptions(precision=precision_map("fp32"), profile=profile))


@pytest.mark.parametrize(
    ("weights", "what", "expected"),
    [
        (arrays(b=None), 'have no "blocks.0.b.weight", which Net has', "a tensor for each parameter"),
        (arrays(b=None, c=np.ones((5, 24))), 'no "blocks.0.b.weight"', 'did you mean "blocks.0.c.weight"?'),
        (arrays(a=np.ones((32, 24))), 'tensor "blocks.0.a.weight" is (32, 24)', "(24, 32), by Net"),
        (arrays(c=np.ones(3)), 'Net has no parameter "blocks.0.c.weight"', "did you mean"),
    ],
)
def test_weights_of_ones_own(weights: Any, what: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(weights=weights)
    assert what in error.value.what and expected in error.value.expected
    said = str(error.value)
    assert not any(word in said for word in ("checkpoint", "config.json", "shard", "download"))


@pytest.mark.parametrize(
    ("forward", "what", "fix"),
    [
        (lambda m, x: m.b(x), "in blocks.0.b: linear: x [batch, 32]", "change the forward() that says it"),
        (lambda m, x: m.b(m.a(x) * x), "in blocks.0: elementwise", "change the forward()"),
        (lambda m, x: m.b(np.tanh(m.a(x))), "numpy.tanh is called on a tensor", "Parameter or a Table"),
        (lambda m, x: m.b(m.a(x) + np.ones(24)), "ndarray stands beside a tensor", "Parameter or a Table"),
        (lambda m, x: m.b(np.ones(24) * m.a(x)), "ndarray stands beside a tensor", "Parameter or a Table"),
        (lambda m, x: m.b(x) if x.shape[0] > 3 else x, "the dimension batch is compared with 3", "holds for any size"),
        (
            lambda m, x: m.b(x) if x.shape[0] <= x.shape[1] else x,
            "the dimension batch is compared",
            "holds for any size",
        ),
        (lambda m, x: m.b(m.a(x) + "1"), "str stands beside a tensor", "Parameter or a Table"),
        (lambda m, x: m.b(np.add.reduce(m.a(x))), "numpy.add is called on a tensor", "Parameter or a Table"),
    ],
)
def test_what_a_forward_may_not_say(forward: Callable[[Any, Tensor], Any], what: str, fix: str) -> None:
    with pytest.raises(GraphError) as error:
        planned(forward)
    assert what in error.value.what and fix in error.value.fix


@pytest.mark.parametrize("bad", [[[1.0] * 24] * 5, np.array([["x"]]), np.ones((5, 24), bool), None])
def test_weights_are_arrays_of_numbers(bad: Any) -> None:
    weights = {**arrays(), "blocks.0.b.weight": bad}
    with pytest.raises(ConfigError, match=r'the weight "blocks.0.b.weight" is (a|of) ') as error:
        planned(weights=weights)
    assert "numpy.asarray" in error.value.fix


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        ({"profile": {"batch": (1, 4, 8)}}, "the bounds of batch are a tuple", '"batch": Bounds(smallest'),
        ({"keep": "blocks.0.a"}, "keep is a text", 'keep=("blocks.0.a",)'),
    ],
)
def test_options_of_a_build(options: Any, what: str, fix: str) -> None:
    given: Any = {"profile": {"batch": Bounds(1, 4, 8)}, **options}
    with pytest.raises(ConfigError) as error:
        plan_engine(Source.from_module(Net(right), arrays()), BuildOptions(**given))
    assert what in error.value.what and fix in error.value.fix


def test_weights_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="is a Tensor"):
        planned(weights={**arrays(), "blocks.0.b.weight": torch.ones(5, 24)})


def with_numbers(two: Any, block: Any, x: Tensor) -> Tensor:
    return right(block, two * x) - two + two / (ops.absolute(right(block, x)) + 1)  # type: ignore[no-any-return]


def test_numbers_of_numpy_stand_beside_tensors(tmp_path: Path) -> None:
    """np.float32(2) * x is x twice; before, NumPy made an array of objects of it."""
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    found = []
    for two in (2.0, np.float32(2), np.float64(2), np.int64(2)):
        source, plan = planned(partial(with_numbers, two))
        folder = tmp_path / type(two).__name__
        write_engine(source, plan, folder, name="net")
        found.append(Engine.open(folder).stateless_executor(threads=1).run({"x": x})["y"])
    assert all((y == found[0]).all() for y in found)
