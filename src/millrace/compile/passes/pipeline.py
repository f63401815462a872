"""The passes from a traced graph to a lowered one, in order. The graph is verified after each."""

from collections.abc import Callable

from millrace.compile.passes.expressions import fold_constants, fuse_elementwise, gather_early
from millrace.compile.passes.fusions import (
    convert_inputs,
    fuse_convert,
    fuse_epilogue,
    fuse_residual,
    fuse_rope_attention,
    rescore_head,
)
from millrace.compile.passes.products import choose_precision, merge_gated, merge_linears
from millrace.compile.precision import PrecisionMap
from millrace.graph.rewrite import prune
from millrace.graph.types import Graph
from millrace.graph.verify import verify

Pass = Callable[[Graph], Graph]


def pipeline(precisions: PrecisionMap) -> list[tuple[str, Pass]]:
    """Return the passes for a CPU. The order is the design: passes for all targets come first."""
    return [*portable(precisions), *cpu(precisions)]


def portable(precisions: PrecisionMap) -> list[tuple[str, Pass]]:
    """Return the passes for any device: grow expressions, then merge matmuls."""
    return [
        ("fold_constants", fold_constants),
        ("gather_early", gather_early),
        ("fuse_elementwise", fuse_elementwise),
        ("choose_precision", lambda g: choose_precision(g, precisions)),
        ("merge_gated", lambda g: merge_gated(g, precisions)),
        ("merge_linears", lambda g: merge_linears(g, precisions)),
    ]


def cpu(precisions: PrecisionMap) -> list[tuple[str, Pass]]:
    """Return the passes for our CPU kernels: fuse neighbors into matmuls, then pack rows."""
    return [
        ("fuse_epilogue", fuse_epilogue),
        ("fuse_residual", fuse_residual),
        ("fuse_rope_attention", fuse_rope_attention),
        ("convert_inputs", lambda g: convert_inputs(g, precisions)),
        ("fuse_convert", fuse_convert),
        ("rescore_head", lambda g: rescore_head(g, precisions)),
        ("prune", prune),
    ]


def gpu(precisions: PrecisionMap) -> list[tuple[str, Pass]]:
    """Return the passes for a GPU: fuse neighbors into matmuls, and convert rows once for all readers."""
    return [
        *portable(precisions),
        ("fuse_epilogue", fuse_epilogue),
        ("fuse_residual", fuse_residual),
        ("fuse_rope_attention", fuse_rope_attention),
        ("convert_inputs", lambda g: convert_inputs(g, precisions)),
        ("prune", prune),
    ]


def unfused(precisions: PrecisionMap) -> list[tuple[str, Pass]]:
    """Return the one-to-one lowering, with nothing but precisions. The fused engine is compared with it."""
    return [
        ("fold_constants", fold_constants),
        ("choose_precision", lambda g: choose_precision(g, precisions)),
        ("convert_inputs", lambda g: convert_inputs(g, precisions)),
        ("rescore_head", lambda g: rescore_head(g, precisions)),
        ("prune", prune),
    ]


def run_passes(graph: Graph, passes: list[tuple[str, Pass]]) -> Graph:
    for name, step in passes:
        graph = verify(step(graph), after=name)
    return graph
