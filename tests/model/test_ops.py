"""What a user's model may say, compiled and run: each operator against NumPy in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.engine import Engine
from millrace.model import ops
from millrace.model.layers import Embedding, Linear
from millrace.model.module import Module
from millrace.model.tensor import Tensor
from tests.support.engines import last_logits

N, VOCABULARY = 32, 40
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Model(Module):
    """The operator on a token's row; as its head is the identity, the logits are what it gives."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        self.embed, self.head = Embedding(VOCABULARY, N), Linear(N, N)
        self._operator = operator

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(ops.sampled_rows(self._operator(self.embed(tokens))))


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
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_what_its_name_says(name: str, tmp_path: Path) -> None:
    operator, truth = OPERATORS[name]
    table = np.random.default_rng(0).normal(0, 3, (VOCABULARY, N)).astype(np.float32)
    table[7, :2] = 0.0, -0.0
    arrays = {"embed.weight": table, "head.weight": np.eye(N, dtype=np.float32)}
    source = Source.from_module(Model(operator), arrays, max_context=64)
    options = BuildOptions(precision=precision_map("fp32"), max_batch=4, max_step_tokens=16)
    write_engine(source, plan_engine(source, options), tmp_path / "engine", name=name)
    engine = Engine.open(tmp_path / "engine")
    executor = engine.executor(n_pages=4, threads=1)
    found = last_logits(engine, executor, [[3, 7], [9]])
    executor.close()
    exact = truth(table[[7, 9]].astype(np.float64))
    # float32 sums of a product with the identity are exact: what is lost is the operator's, a few ulps
    np.testing.assert_allclose(found, exact, rtol=8 * np.finfo(np.float32).eps, atol=1e-7)
