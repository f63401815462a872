"""The pass over calibration text that collects statistics of the inputs of each matmul, one piece at a time.

The model is split at its residual stream (graph/partition.py); a piece's executor outputs the inputs of its matmuls.
Memory holds one piece's weights, its Gram matrices, and some windows of rows; the inputs of the next piece are in a
file. There are W windows of n tokens.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.build import BuildOptions, plan_pieces
from millrace.compile.lower_cpu.program import Bounds, Program
from millrace.compile.precision import PrecisionMap
from millrace.compile.settings import Progress
from millrace.compile.source import Source
from millrace.compress.calibration.statistics import (
    CalibrationStatistics,
    InputStatistics,
    StatisticsInfo,
    StatisticsWriter,
    input_bytes,
    whole_file,
    writing,
)
from millrace.compress.presets import SAMPLES
from millrace.errors import ConfigError, MachineError
from millrace.evaluate.divergence import not_finite, step_of
from millrace.evaluate.piecewise_forward import Piece, loaded
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_windows import Windows, windows_of
from millrace.graph.partition import CARRIED
from millrace.graph.rewrite import head_of
from millrace.graph.types import Graph, Port, Value
from millrace.kernels.precision import Precision

_BATCH = 8192  # rows multiplied at once: after each product BLAS threads spin for a while and slow down the next step
Readers = dict[str, tuple[str, ...]]  # first layer that reads an input -> all layers that read it


def samples(tokenizer: Tokenizer, text: str, n: int = SAMPLES, length: int = LENGTH) -> Windows:
    """Return n windows, spread evenly over the text. raises ConfigError if it has fewer"""
    ids = tokenizer.encode(text)
    if n < 1 or len(ids) < n * length:
        fitting = len(ids) // length
        fewer = f", or ask for fewer samples: --samples {fitting}" if 0 < fitting < n else ""
        raise ConfigError(
            f"the text for statistics has {len(ids):,} tokens, for {n} samples of {length}",
            f"at least {max(n, 1) * length:,}", f"give a longer text: --samples-from{fewer}",
        )  # fmt: skip
    return replace(windows_of(tokenizer, ids, length).spread(n), first=0)


def digest_of(text: Windows) -> str:
    """Return a digest of the windows' token ids."""
    return hashlib.blake2b(text.ids.tobytes(), digest_size=16).hexdigest()


def collect(
    source: Source, text: Windows, folder: Path, *, precision: Precision = Precision.FP32,
    progress: Progress = lambda *_: None,
) -> CalibrationStatistics:  # fmt: skip
    """Collect statistics of all linear layers except the head into a folder. A later run resumes from it.

    precision: FP32 or BF16, in which the model runs
    raises ConfigError if the folder has other statistics, MachineError if the disk is full or logits are not finite
    """
    length = int(text.ids.shape[1])
    options = BuildOptions(
        precision=PrecisionMap(precision),
        max_batch=1,
        max_step_tokens=length,
        profile={"T": Bounds(1, length, length)},
    )
    readers: Readers = {}
    programs = list(plan_pieces(source, options, lambda piece: _ports(piece, readers)))
    about = StatisticsInfo(
        model=source.identity(), text=digest_of(text),
        tokens=text.ids.size, precision=str(precision), pieces=len(programs),
    )  # fmt: skip
    with writing(folder, about) as files:
        first = files.next
        _check_room(folder, programs[first:], text)
        for number in range(first, len(programs)):
            progress("collecting statistics", number, len(programs))
            onward = _through(programs[number], number, text, files, source.vocab_size)
            files.add(number, [sums.result(readers[name]) for name, sums in onward.items()])
            files.carried(number).unlink(missing_ok=True)
        progress("collecting statistics", len(programs), len(programs))
    return CalibrationStatistics.open(folder)


def linear_inputs(graph: Graph) -> dict[Value, list[str]]:
    """Return the inputs of linear layers except the head, with the names of the layers that read them."""
    head, to_statistics = head_of(graph), dict[Value, list[str]]()
    for node in graph.nodes:
        if node.op == "linear" and node is not head:
            to_statistics.setdefault(node.inputs[0], []).append(node.origin[0])
    return to_statistics


def _ports(piece: Graph, readers: Readers) -> tuple[Port, ...]:
    """Return the ports of the next piece, and inputs named after their first reader; adds these to `readers`."""
    inputs = linear_inputs(piece)
    readers |= {names[0]: tuple(names) for names in inputs.values()}
    carried = (port for port in piece.outputs if port.name == CARRIED)
    return (*carried, *(Port(names[0], value) for value, names in inputs.items()))


def _through(
    program: Program, number: int, text: Windows, files: StatisticsWriter, vocab_size: int
) -> dict[str, "_Sums"]:
    """Run all windows through a piece; writes the inputs of the next piece to its file."""
    names = [slot.name for slot in program.outputs if slot.name != CARRIED]
    carries, sums = len(names) < len(program.outputs), dict[str, _Sums]()
    with closing(loaded(program, text, vocab_size)) as executor, whole_file(files.carried(number + 1)) as onward:
        for window, carried in zip(text.ids, _carried(files.carried(number), number, text), strict=True):
            piece = Piece(program, executor, carried)
            piece.run(step_of(window, 0, len(window), ()))
            for name in names:
                x = piece.output(name)
                sums.setdefault(name, _Sums(int(x.shape[1]))).add(x)
            if carries:
                onward.write(np.ascontiguousarray(piece.output(CARRIED), np.float32))
    if not carries:
        files.carried(number + 1).unlink()
    return sums


def _carried(path: Path, number: int, text: Windows) -> Iterator[NDArray[np.float32] | None]:
    """Yield each window's input of the piece, (n, ...); None for the first piece, which reads only tokens."""
    W, n = text.ids.shape
    if number == 0:
        yield from [None] * W
        return
    size = path.stat().st_size // (4 * W * n)
    with path.open("rb") as file:
        for _ in range(W):
            rows = np.fromfile(file, np.float32, n * size).reshape(n, -1)
            yield rows


class _Sums:
    """Sums over the rows of one input (T, K), multiplied in batches, in float32."""

    def __init__(self, K: int) -> None:
        self._gram, self._product = np.zeros((K, K), np.float32), np.empty((K, K), np.float32)
        self._amax, self._sum = np.zeros(K, np.float32), np.zeros(K)
        self._batch, self._n_buffered, self._n = np.empty((_BATCH, K), np.float32), 0, 0

    def add(self, x: NDArray[np.generic]) -> None:
        at = 0
        while at < len(x):
            n_taken = min(len(x) - at, _BATCH - self._n_buffered)
            self._batch[self._n_buffered : self._n_buffered + n_taken] = x[at : at + n_taken]
            at, self._n_buffered = at + n_taken, self._n_buffered + n_taken
            if self._n_buffered == _BATCH:
                self._flush()

    def result(self, linears: tuple[str, ...]) -> InputStatistics:
        """Return the statistics. raises MachineError if values are not finite"""
        self._flush()
        if not np.isfinite(self._amax).all() or not np.isfinite(self._gram.diagonal()).all():
            raise not_finite()
        self._gram /= np.float32(self._n)
        return InputStatistics(linears, self._gram, self._amax, (self._sum / self._n).astype(np.float32))

    def _flush(self) -> None:
        x = self._batch[: self._n_buffered]
        self._gram += np.matmul(x.T, x, out=self._product)
        np.abs(x, out=x)
        self._amax = np.maximum(self._amax, x.max(axis=0, initial=0))
        self._sum += x.sum(axis=0, dtype=np.float64)
        self._n, self._n_buffered = self._n + self._n_buffered, 0


def _check_room(folder: Path, programs: Sequence[Program], text: Windows) -> None:
    """Check disk space before any long work. raises MachineError if there is too little"""
    widths = [(slot.name, _width(slot.shape)) for program in programs for slot in program.outputs]
    carried = max((width for name, width in widths if name == CARRIED), default=0)
    needed = sum(input_bytes(width) for name, width in widths if name != CARRIED) + 8 * carried * text.ids.size
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"the statistics need {needed:,} bytes in {folder}, where {free:,} are free", "room for them",
            "make room, or name another folder",
        )  # fmt: skip


def _width(shape: Sequence[object]) -> int:
    to_statistics = 1
    for d in shape[1:]:
        assert isinstance(d, int), shape
        to_statistics *= d
    return to_statistics
