"""What a user's model may say, compiled and run: each operator against NumPy in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.model import ops
from millrace.model.module import Module, Signature
from millrace.model.tensor import Tensor

N = 32
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Model(Module):
    """The operator alone, on rows of any number."""

    signature = Signature({"x": ("rows", N)}, ("y",))

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        self._operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self._operator(x)


OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Floats], Floats]]] = {
    "absolute": (ops.absolute, np.abs),
    "exp": (ops.exp, np.exp),
    "sqrt": (lambda x: ops.sqrt(ops.absolute(x)), lambda x: np.sqrt(np.abs(x))),
    "tanh": (ops.tanh, np.tanh),
    "sigmoid": (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "maximum": (lambda x: ops.maximum(x, 0.5), lambda x: np.maximum(x, 0.5)),
    "minimum": (lambda x: ops.minimum(x, 2.0 - x), lambda x: np.minimum(x, 2 - x)),
    "relu": (ops.relu, lambda x: np.maximum(x, 0)),
    "silu": (ops.silu, lambda x: x / (1 + np.exp(-x))),
    "erf": (ops.erf, lambda x: np.vectorize(math.erf)(x)),
    "reshape": (lambda x: 2 * x.reshape(-1, 4, 8).flatten(1), lambda x: 2 * x),
    "normalise": (ops.normalise, lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_what_its_name_says(name: str, tmp_path: Path) -> None:
    operator, truth = OPERATORS[name]
    x = np.random.default_rng(0).normal(0, 3, (40, N)).astype(np.float32)
    x[7, :2] = 0.0, -0.0
    source = Source.from_module(Model(operator), {})
    options = BuildOptions(precision=precision_map("fp32"), profile={"rows": Bounds(1, 40, 40)})
    write_engine(source, plan_engine(source, options), tmp_path / "engine", name=name)
    network = Engine.open(tmp_path / "engine").stateless_executor(threads=1)
    found = network.run({"x": x})["y"].astype(np.float64)
    network.close()
    # a few ulps of the operator's own
    assert np.allclose(found, truth(x.astype(np.float64)), rtol=8 * float(np.finfo(np.float32).eps), atol=1.2e-7)
