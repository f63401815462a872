"""Simulates a checkpoint's FP8 activations with the reference engine, because no kernel here supports them.

The interpreter processes a text in float64, piece by piece as in piecewise_forward.py. Activations that the checkpoint
specifies as E4M3 are rounded to it, each row with the scale of its largest value, like in engines with FP8 arithmetic.
"""

import numpy as np
from numpy.typing import NDArray

from millrace.compile.build import BuildOptions, plan_pieces, reference_pieces, resolve_options
from millrace.compile.source import Source
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.reference.interpreter import Interpreter
from millrace.evaluate.divergence import Progress, step_of
from millrace.evaluate.piecewise_forward import ReadText
from millrace.evaluate.text_windows import Windows
from millrace.graph.partition import CARRIED
from millrace.graph.types import Graph


def fp8_rows(source: Source) -> frozenset[str]:
    """Return the linear layers whose activations the checkpoint specifies as E4M3 with a scale per token."""
    return frozenset(name for name, matrix in source.stored.items() if matrix.fp8_rows)


def read_with_fp8(source: Source, options: BuildOptions, text: Windows, progress: Progress) -> ReadText:
    """Like `piecewise_forward.read`, with FP8 activations in all pieces except the last, which has the head.

    options: for steps of a whole window. raises CheckpointError if weights are broken
    """
    *body, _ = reference_pieces(source, options)
    programs = tuple(plan_pieces(source, options))
    carried: NDArray[np.float32] | None = None
    for done, piece in enumerate(body):
        progress(done, len(body))
        carried = _through(piece, source, options, text, carried)
    return ReadText(text, programs[-1], carried, sum(p.matrix_bytes for p in programs))


def _through(
    piece: Graph, source: Source, options: BuildOptions, text: Windows, carried: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return the outputs of a piece, (W, n, ...)."""
    chosen, length = resolve_options(source, options), int(text.ids.shape[1])
    pages = np.arange(-(-length // PAGE_TOKENS), dtype=np.int32)
    interpreter = Interpreter(
        piece, kv=chosen.kv_format, bf16_table=chosen.table == "bf16", n_pages=len(pages), fp8_rows=fp8_rows(source)
    )
    result = []
    for window, ids in enumerate(text.ids):
        step = step_of(ids, 0, length, ())
        inputs: dict[str, NDArray[np.generic]] = {
            "tokens": step.tokens, "positions": step.positions, "lengths": np.diff(step.starts),
            "rows": step.sampling["token"],
        }  # fmt: skip
        if carried is not None:
            inputs[CARRIED] = carried[window]
        result.append(interpreter.run(inputs, (pages,))[CARRIED].astype(np.float32))
        interpreter.forget()
    return np.stack(result)
