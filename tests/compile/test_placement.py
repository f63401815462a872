"""Where values lie while a program is written: who marks that something is still needed."""

import pytest

from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.lower_cpu.program_builder import ProgramBuilder
from millrace.engine.cache_specs import CacheSpec, KvFormat
from millrace.graph.types import DType, Graph, Node, Port, Symbol, Value
from millrace.kernels.catalogue import operators
from millrace.kernels.declare import RowFormat
from millrace.kernels.operand_places import View
from millrace.kernels.row_storage import DENSE, Storage

T, S = Symbol("T"), Symbol("S")


def test_pages_of_one_run_live_as_long_as_calls_are_given_their_cache() -> None:
    """Whatever the kernel calls its parameters: a call that only looks like one that has a cache marks nothing."""
    x, lengths = Value((T, 16)), Value((S,), DType.I32)
    node = Node(operators()["elementwise"], (x,), (Value((T, 16)),), {"tree": 0})
    graph = Graph((Port("x", x), Port("lengths", lengths)), (Port("y", node.output),), (node,))
    placement = ProgramBuilder(graph, {T: Bounds(1, 8, 128), S: Bounds(1, 2, 4)}, KvFormat.BF16, "bf16")
    cache, kept = (placement.cache(2, 16, 24, persistent=kept) for kept in (False, True))
    assert (cache.number, cache.layer, cache.format, kept.number, kept.buffer) == (0, 0, "bf16", 1, None)
    for given in (cache, None, cache, kept, None):
        params = {"cache": 0, "layer": 5} if given is None else {}
        placement.add("attention", {}, params, node, cache=given)
    (pages,) = placement._lives
    assert (pages.first, pages.last) == (0, 2)
    spec = CacheSpec(layers=1, heads=2, key_size=16, value_size=24, format=KvFormat.BF16)
    assert pages.nbytes == (128 // 64 + 4) * spec.page_bytes()
    assert [(c.params["cache"], c.params["layer"]) for c in placement._calls][2:4] == [(0, 0), (1, 0)]


def test_layers_of_one_shape_share_a_cache() -> None:
    x, lengths = Value((T, 16)), Value((S,), DType.I32)
    graph = Graph((Port("x", x), Port("lengths", lengths)), (Port("x", x),), ())
    placement = ProgramBuilder(graph, {T: Bounds(1, 8, 128), S: Bounds(1, 2, 4)}, KvFormat.F32, "f32")
    found = [placement.cache(heads, 16, 16, persistent=True) for heads in (1, 2, 1, 1)]
    assert [(c.number, c.layer) for c in found] == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_rows_are_counted_in_the_units_that_are_asked_for() -> None:
    """A kernel that reads floats is not given rows that are something else."""
    dense, bf16, q8 = (
        View(0, 0, 640, 0, storage) for storage in (DENSE, Storage(RowFormat.BF16), Storage(RowFormat.Q8, 32))
    )
    assert (dense.row_floats, dense.row_elements, bf16.row_elements) == (160, 160, 320)
    for packed in (bf16, q8):
        with pytest.raises(AssertionError, match="are not floats"):
            _ = packed.row_floats
    with pytest.raises(KeyError):
        _ = q8.row_elements
