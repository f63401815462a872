"""Where graphs fall into pieces: at the residual stream of transformers, and nowhere else."""

from itertools import pairwise
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.passes.expressions import fold_constants, fuse_elementwise
from millrace.compile.source import Source
from millrace.graph.partition import CARRIED, cut
from millrace.graph.rewrite import prune
from millrace.graph.types import Graph
from millrace.graph.verify import verify
from millrace.kernels.catalogue import operators
from millrace.model import ops
from millrace.model.layers import Linear
from millrace.model.module import Module, Signature, Weights, trace_model
from millrace.model.tensor import Tensor
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.networks import Digits, parameters


def traced(model: Module) -> Graph:
    arrays = parameters(model)
    weights = Weights({n: a.shape for n, a in arrays.items()}, arrays.__getitem__)
    return grown(trace_model(model, weights, operators()))


def grown(graph: Graph) -> Graph:
    return fuse_elementwise(fold_constants(graph))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_is_cut_at_its_residual_stream(tmp_path: Path, family: str) -> None:
    source = Source.from_checkpoint(Checkpoint.open(random_checkpoint(tmp_path, family)))
    graph = grown(trace_model(source.module, source.weights, operators()))
    pieces = cut(graph)
    assert len(pieces) == 1 + 2 * 2, "the embedding, and of each layer what stands before and behind its middle"
    for piece in pieces:
        verify(piece, after="cut")
        assert piece.symbols == graph.symbols
        assert sum(n.op == "attention" for n in piece.nodes) <= 1
    assert [n for piece in pieces for n in piece.nodes] == list(prune(graph).nodes)
    for one, next_ in pairwise(pieces):
        (out,) = one.outputs
        assert out.name == CARRIED and next_.inputs == (*graph.inputs, type(out)(CARRIED, out.value))
    assert pieces[0].inputs == graph.inputs and pieces[-1].outputs == graph.outputs


class Blocks(Module):
    """A stream that two read, then one that one reads, then one of other rows."""

    signature = Signature({"x": ("n", 8)}, ("y",))

    def __init__(self) -> None:
        self.one, self.two, self.three = Linear(8, 8), Linear(8, 8), Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.one(x)
        h = h + ops.gelu(self.two(h))  # h has two readers: the sum and the layer
        return self.three(ops.gelu(h))  # one: an activation that a pass may take up


def test_it_is_cut_where_two_read_and_not_where_a_pass_would_reach_across() -> None:
    graph = traced(Blocks())
    pieces = cut(graph)
    assert len(pieces) == 2
    assert [n.op for n in pieces[0].nodes] == ["linear", "elementwise"]
    assert pieces[1].nodes[0].origin == ("two",) and pieces[1].outputs == graph.outputs


def test_a_graph_without_such_places_is_one_piece() -> None:
    """Two outputs, one of which is there early: it is alive to the end."""
    graph = traced(Digits())
    assert cut(graph) == (prune(graph),)


class Early(Module):
    """What is handed out lives to the end, so nothing behind it is carried alone."""

    signature = Signature({"x": ("n", 8)}, ("h", "y"))

    def __init__(self) -> None:
        self.one, self.two = Linear(8, 8), Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + self.one(x)
        g = h + self.two(h)
        return h, g + ops.gelu(g)


def test_what_is_an_output_too_is_not_carried() -> None:
    assert len(cut(traced(Early()))) == 1
