"""The graph that an engine keeps can be lowered again: the same passes give the same program."""

import json
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.lower_cpu.program_builder import lower
from millrace.compile.passes.pipeline import pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import GRAPH, PROGRAM
from millrace.engine.cache_specs import KvFormat
from millrace.errors import GraphError
from millrace.graph.graph_json import graph_table, read_graph
from millrace.graph.rewrite import listing
from millrace.graph.types import Graph, Symbol
from millrace.kernels.catalogue import operators
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.networks import IMAGES, Digits, parameters


def lowered(graph: Graph, engine: Engine, precision: str, kv: KvFormat) -> bytes:
    bounds = {Symbol(s.name): Bounds(s.low, s.usual, s.high) for s in engine.manifest.symbols}
    passed = run_passes(graph, pipeline(precision_map(precision)))
    return lower(passed, bounds, kv, "f32" if precision == "fp32" else "bf16").encoded()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "kv"), [("fp32", KvFormat.F32), ("w4a8", KvFormat.INT8)])
def test_a_language_model(family: str, precision: str, kv: KvFormat, tmp_path: Path) -> None:
    source = Source.from_checkpoint(Checkpoint.open(random_checkpoint(tmp_path / "checkpoint", family, seed=3)))
    plan = plan_engine(source, BuildOptions(precision=precision_map(precision), kv_format=kv))
    write_engine(source, plan, tmp_path / "engine", name="test")
    engine = Engine.open(tmp_path / "engine")
    table = json.loads((engine.folder / GRAPH).read_text())
    graph = read_graph(table, operators())
    assert json.loads(json.dumps(graph_table(graph))) == table and listing(graph) == listing(plan.traced)
    assert lowered(graph, engine, precision, kv) == (engine.folder / PROGRAM).read_bytes()


def test_any_network(tmp_path: Path) -> None:
    source = Source.from_module(Digits(), parameters(Digits()))
    plan = plan_engine(source, BuildOptions(precision=precision_map("w8a8"), profile=IMAGES))
    write_engine(source, plan, tmp_path / "engine", name="test")
    engine = Engine.open(tmp_path / "engine")
    graph = read_graph(json.loads((engine.folder / GRAPH).read_text()), operators())
    assert [p.name for p in (*graph.inputs, *graph.outputs)] == ["pixels", "weights", "scores", "hidden"]
    assert lowered(graph, engine, "w8a8", KvFormat.BF16) == (engine.folder / PROGRAM).read_bytes()
    constant = next(graph.constants()).constant
    assert constant
    with pytest.raises(GraphError, match="without content"):
        constant.load()
