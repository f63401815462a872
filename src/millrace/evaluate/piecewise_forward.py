"""Runs a language model on a text piece by piece, like a built engine, with the weights of one piece in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.compile.build import pack_weights
from millrace.compile.lower_cpu.program import Program
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.engine.io_slots import slot, write_slot
from millrace.engine.native.executor import NativeExecutor, NativeProgram
from millrace.evaluate.divergence import DivergenceScore, LogProbs, log_probabilities, step_of
from millrace.evaluate.text_windows import Windows
from millrace.graph.partition import CARRIED

Advance = Callable[[], None]  # called when a piece is done
Answers = Callable[[int], LogProbs]  # log probabilities of a window by its index


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text processed by all pieces except the last, which computes the logits.

    carried: (W, n, ...) the last piece's inputs, for each token of each window; None if there is only one piece
    matrix_bytes: bytes of the weights of all pieces' matmuls
    """

    text: Windows
    last: Program
    carried: NDArray[np.float32] | None
    matrix_bytes: int


class Piece:
    """A loaded piece that runs steps; before each step its inputs are written, by position."""

    def __init__(self, program: Program, executor: NativeExecutor, carried: NDArray[np.float32] | None) -> None:
        self._executor, self._carried, self._slot = executor, carried, slot(program.inputs, CARRIED)
        self.limits: ExecutorLimits = executor.limits

    def run(self, step: StepInputs) -> object:
        if self._slot is not None and self._carried is not None:
            write_slot(self._executor.activations(), self._slot, self._carried[step.positions])
        return self._executor.run(step)

    def output(self, name: str) -> NDArray[np.generic]:
        return self._executor.output(name)


def read(pieces: Sequence[Program], text: Windows, vocab_size: int, advance: Advance) -> ReadText:
    """Process a text. pieces: from plan_pieces(), for steps of a whole window. raises CheckpointError"""
    *body, last = pieces
    carried: NDArray[np.float32] | None = None
    for program in body:
        carried = _through(program, text, carried, vocab_size)
        advance()
    return ReadText(text, last, carried, sum(p.matrix_bytes for p in pieces))


@contextmanager
def answers(read_text: ReadText, vocab_size: int) -> Iterator[Answers]:
    """Load the last piece, which computes the windows' log probabilities during the block."""
    text = read_text.text
    with closing(loaded(read_text.last, text, vocab_size)) as executor:

        def log_probs_of_window(window: int) -> LogProbs:
            piece = Piece(read_text.last, executor, _carried_rows(read_text.carried, window))
            return log_probabilities(piece, text.ids[window], text.first)

        yield log_probs_of_window


def score(reference: Answers, other: Answers, text: Windows) -> DivergenceScore:
    """Compare with the reference. Memory: the log probabilities of one window."""
    read_text = DivergenceScore()
    for window, ids in enumerate(text.ids):
        read_text.add(other(window), reference(window), ids[text.first + 1 :])
    return read_text


def _through(
    program: Program, text: Windows, carried: NDArray[np.float32] | None, vocab_size: int
) -> NDArray[np.float32]:
    with closing(loaded(program, text, vocab_size)) as executor:
        return np.stack(list(_windows(program, executor, text, carried)))


def _windows(
    program: Program, executor: NativeExecutor, text: Windows, carried: NDArray[np.float32] | None
) -> Iterable[NDArray[np.float32]]:
    """Yield the piece's outputs for each window."""
    for window, ids in enumerate(text.ids):
        piece = Piece(program, executor, _carried_rows(carried, window))
        piece.run(step_of(ids, 0, len(ids), ()))
        yield piece.output(CARRIED).astype(np.float32, copy=False)


def _carried_rows(carried: NDArray[np.float32] | None, window: int) -> NDArray[np.float32] | None:
    return None if carried is None else carried[window]


def loaded(program: Program, text: Windows, vocab_size: int) -> NativeExecutor:
    """Load a piece with KV pages for one window, which the next window reuses."""
    weights = np.zeros(program.weights_bytes, np.uint8)

    def put(data: memoryview, offset: int) -> None:
        weights[offset : offset + data.nbytes] = data

    pack_weights(program, put, lambda *_: None)
    native = NativeProgram(
        calls=program.encoded(), n_calls=len(program.calls), weights=weights, weights_bytes=program.weights_bytes,
        activation_bytes=program.memory.total_bytes, symbols={s: b.high for s, b in program.symbols.items()},
        inputs=program.inputs, outputs=program.outputs, caches=program.caches,
        states=program.states, sizes=program.sizes,
    )  # fmt: skip
    length = int(text.ids.shape[1])
    return NativeExecutor(native, n_pages=-(-length // PAGE_TOKENS), max_context=length, vocab_size=vocab_size)
