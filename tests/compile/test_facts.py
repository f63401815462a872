"""Passes go by what an operator says of itself, and by no list of names: one's own has the same rights."""

from collections import Counter

import pytest

from millrace.compile.passes.pipeline import pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.graph.shape_rules import same_shape
from millrace.graph.types import DType, Graph, Node, Port, Symbol, Value
from millrace.kernels.catalogue import operators
from millrace.kernels.convert.op import packs_elements, packs_rows
from millrace.kernels.gather_rows.op import GATHER_ROWS
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue
from millrace.model.layers import Linear
from millrace.model.module import Module, Signature, Weights, trace_model
from millrace.model.tensor import Tensor
from tests.support.networks import parameters

T, R = Symbol("T"), Symbol("R")


def own(**facts: object) -> KernelOperator:
    def reference(node: Node, values: EvaluationContext) -> StoredValue:
        return values.rows(node.inputs[0])

    def lower(node: Node, writer: ProgramWriter) -> None:
        writer.share(node.output, writer.view(node.inputs[0]))

    return KernelOperator(
        name="own", inputs=(1, 1), attrs=frozenset({"storage"}), shapes=same_shape, reference=reference, lower=lower,
        **facts,  # type: ignore[arg-type]
    )  # fmt: skip


def own_then_linear(width: int) -> Module:
    class OwnThenLinear(Module):
        signature = Signature({"x": ("T", width)}, ("y",))

        def __init__(self) -> None:
            self.linear = Linear(width, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x.trace.add("own", (x,)))
            return y

    return OwnThenLinear()


CASES = [
    ({}, "bf16", 32, False), ({"packs": packs_rows}, "bf16", 32, True), ({"packs": packs_rows}, "w8a8", 32, True),
    ({"packs": packs_elements}, "bf16", 32, True), ({"packs": packs_elements}, "w8a8", 32, False),
    ({"packs": packs_rows}, "bf16", 24, True), ({"packs": packs_elements}, "bf16", 24, False),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "precision", "width", "packs"), CASES)
def test_what_packs_needs_no_conversion(facts: dict[str, object], precision: str, width: int, packs: bool) -> None:
    model = own_then_linear(width)
    arrays = parameters(model)
    weights = Weights({n: a.shape for n, a in arrays.items()}, lambda name: arrays[name])
    traced = trace_model(model, weights, {**operators(), "own": own(**facts)})
    graph = run_passes(traced, pipeline(precision_map(precision, 8)))
    assert Counter(n.op for n in graph.nodes)["convert"] == (not packs)


@pytest.mark.parametrize("row_wise", [True, False])
def test_what_is_row_wise_runs_on_wanted_rows_only(row_wise: bool) -> None:
    x, rows = Value((T, 8)), Value((R,), DType.I32)
    node = Node(own(row_wise=row_wise), (x,), (Value((T, 8)),))
    gathered = Node(GATHER_ROWS, (node.output, rows), (Value((R, 8)),))
    graph = Graph((Port("x", x), Port("rows", rows)), (Port("y", gathered.output),), (node, gathered))
    found = run_passes(graph, [p for p in pipeline(precision_map("fp32")) if p[0] == "gather_early"])
    assert [n.op for n in found.nodes] == (["gather_rows", "own"] if row_wise else ["own", "gather_rows"])
