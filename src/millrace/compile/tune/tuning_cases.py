"""The steps that the tuner times: their rows and contents, and the knobs worth trying."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import Manifest, SlotEntry, dims_of
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.dummy_step import dummy_step
from millrace.engine.encoder_inputs import text_inputs
from millrace.engine.executor import StepInputs
from millrace.errors import ConfigError
from millrace.graph.dims import Symbol, value_of
from millrace.graph.types import NUMPY

ENCODER_ROWS, TEXT_TOKENS = (16, 128, 512), 64
# Most KV that decode steps read together; number of steps that fill their pages first.
DEEP_PAGES, DEEP_BYTES, FILLING_STEPS = 64, 256 << 20, 32
SHARED_FROM = 1024  # tokens of a context whose spans attention divides among workers
BEFORE_CHUNK = 256  # tokens before a prompt's rows: a whole span of keys


@dataclass(frozen=True, slots=True)
class TunedRows:
    """Rows of the timed steps, ascending: of answers, one per sequence, and of prompts."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, max_sequences: int, max_tokens: int) -> "TunedRows":
        """Parse "1,4,16/64,128", within the limits of a step. raises ConfigError"""
        try:
            decode, prefill = (tuple(sorted({int(n) for n in part.split(",")})) for part in text.split("/"))
        except ValueError:
            raise ConfigError(
                f'--tune-rows is "{text:.80}"', "rows of answers, /, rows of prompts", "write it like 1,4,16/64,128"
            ) from None
        for name, rows, most in (("answers", decode, max_sequences), ("prompts", prefill, max_tokens)):
            if not (rows[0] > 0 and rows[-1] <= most and len(rows) <= MAX_CASES):
                what = f"--tune-rows has {','.join(map(str, rows)):.80} for {name}"
                raise ConfigError(what, f"up to {MAX_CASES} numbers from 1 to {most}", "leave the others out")
        return cls(decode, prefill)

    def __str__(self) -> str:
        return "/".join(",".join(map(str, rows)) for rows in (self.decode, self.prefill))

    @property
    def n_cases(self) -> int:
        return len(self.decode) + len(self.prefill)


USUAL_ROWS = TunedRows((1, 4, 16), (64, 128))
MAX_CASES = 8  # for which time is enough


@dataclass(frozen=True, slots=True)
class Case:
    """A step with `rows` rows, and the knobs worth trying."""

    rows: int
    step: Callable[[], Any]  # makes the arguments of the loaded program's run()
    knobs: tuple[str, ...]
    symbols: frozenset[int] | None = None  # by number: those with `rows` rows; None: all of them


def cases_of(engine: Engine, rows: TunedRows = USUAL_ROWS) -> list[Case]:
    """Return the cases, the most important first, because time may run out."""
    m = engine.manifest
    if m.is_encoder:
        sizes = sorted({min(n, m.max_step_tokens) for n in ENCODER_ROWS}, reverse=True)
        return [Case(n, partial(_texts, m, n), _PREFILL) for n in sizes]
    if not m.is_language_model:
        step = partial(_placeholder_inputs, m)
        return [Case(s.usual, step, _knobs(s.usual), frozenset({i})) for i, s in enumerate(m.symbols)]
    n_pages, vocab = pages_of(engine, rows), m.vocab_size
    contexts = {n: min(n_pages // n * PAGE_TOKENS, m.max_context) for n in rows.decode if n <= m.max_sequences}
    decode = [
        Case(n, partial(dummy_step, [1] * n, length - 1, n_pages, vocab=vocab), _knobs(n, length))
        for n, length in contexts.items()
    ]
    room = min(n_pages * PAGE_TOKENS, m.max_context)
    prefill = [
        Case(n, partial(dummy_step, [n], min(BEFORE_CHUNK, room - n), n_pages, vocab=vocab), _PREFILL, frozenset({0}))
        for n in rows.prefill
        if n <= min(m.max_step_tokens, m.max_context)
    ]
    return [*decode[:1], *prefill[::-1][:1], *decode[1:][::-1], *prefill[::-1][1:]]


def _knobs(rows: int, context: int = 0) -> tuple[str, ...]:
    """Return the knobs worth trying with few rows."""
    knobs = ("tile_rows", "ahead", "task_panels") if rows >= 8 else ("ahead", "task_panels")
    return (*knobs, "worker_tasks", "first_level") if context >= SHARED_FROM else knobs


_PREFILL = ("tile_rows", "task_panels", "task_rows")


def _placeholder_inputs(m: Manifest) -> dict[str, NDArray[np.generic]]:
    """Return inputs of the usual sizes: noise for floats, zeros for integers, rows divided among sequences."""
    result: dict[str, NDArray[np.generic]] = {}
    rng = np.random.default_rng(0)
    for slot in m.cpu.inputs:
        shape, dtype = _usual_shape(m, slot), NUMPY[slot.dtype]
        floats = slot.dtype.is_float
        result[slot.name] = rng.standard_normal(shape, np.float32).astype(dtype) if floats else np.zeros(shape, dtype)
    if "lengths" in result:  # of sequences, which share the rows of the first symbol
        rows, sequences = m.symbols[0].usual, len(result["lengths"])
        result["lengths"] = np.diff(np.arange(sequences + 1) * rows // sequences).astype(np.int32)
    return result


def input_bytes(m: Manifest) -> int:
    """Return the bytes of all inputs of the usual sizes."""
    return sum(NUMPY[slot.dtype].itemsize * math.prod(_usual_shape(m, slot)) for slot in m.cpu.inputs)


def _usual_shape(m: Manifest, slot: SlotEntry) -> list[int]:
    sizes = {Symbol(s.name): s.usual for s in m.symbols}
    return [value_of(d, sizes) for d in dims_of(slot)]


def _texts(m: Manifest, n: int) -> dict[str, NDArray[np.int32]]:
    """Return a step of `n` tokens, in texts of medium length."""
    length = min(TEXT_TOKENS, m.max_context)
    lengths = [length] * (n // length) + ([n % length] if n % length else [])
    rng = np.random.default_rng(0)
    return text_inputs([rng.integers(0, m.vocab_size, k) for k in lengths], {s.name for s in m.cpu.inputs})


def _sequences(m: Manifest, rows: TunedRows) -> int:
    return max(1, min(rows.decode[-1], m.max_sequences))


def pages_of(engine: Engine, rows: TunedRows = USUAL_ROWS) -> int:
    """Return the KV pages that each case needs; decode steps divide all of them among their sequences."""
    m, sequences = engine.manifest, _sequences(engine.manifest, rows)
    bound = DEEP_BYTES // max(1, engine.page_bytes)
    each = min(min(DEEP_PAGES, bound) // sequences, FILLING_STEPS, m.max_context // PAGE_TOKENS)
    return max(sequences * max(each, 2), -(-rows.prefill[-1] // PAGE_TOKENS))


def max_context_step(engine: Engine, rows: TunedRows = USUAL_ROWS) -> int:
    """Return the longest timed context in tokens; 0 if there is none."""
    m = engine.manifest
    return min(pages_of(engine, rows) * PAGE_TOKENS, m.max_context) if m.is_language_model else 0


def filling(engine: Engine, rows: TunedRows = USUAL_ROWS) -> Iterator[StepInputs]:
    """Yield steps that write to every page of a language model: unwritten memory reads far too fast."""
    m, n_pages, sequences = engine.manifest, pages_of(engine, rows), _sequences(engine.manifest, rows)
    for first in range(0, min(n_pages // sequences * PAGE_TOKENS, m.max_context), PAGE_TOKENS):
        yield dummy_step([1] * sequences, first, n_pages, vocab=m.vocab_size)
