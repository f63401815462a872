"""A request, and the state of one of its choices: which tokens it has, how many are computed, which pages hold them.

A choice is a `Sequence`: prompt, then output. The scheduler moves `n_computed` towards `n_tokens`; when they meet, the
executor draws the next token and `append` puts `n_tokens` one ahead again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, IntArray
from millrace.runtime.pages import Pages
from millrace.runtime.params import Delta, SamplingParams
from millrace.runtime.resolve import SEED_MASK, Resolved

Deliver = Callable[[list[Delta]], None]  # called in the engine thread, at most once a step per request


class IntBuffer:
    """A growing int32 array that is sliced without copying: the tokens of a sequence, or its page table."""

    __slots__ = ("_data", "_n")

    def __init__(self, start: IntArray | Pages = ()) -> None:
        self._n = len(start)
        self._data = np.empty(max(16, self._n + 16), dtype=np.int32)
        self._data[: self._n] = start

    def __len__(self) -> int:
        return self._n

    @property
    def array(self) -> IntArray:
        """The values so far (n,), a view that the next append may outgrow."""
        return self._data[: self._n]

    def append(self, value: int) -> None:
        if self._n == len(self._data):
            self._grow(self._n + 1)
        self._data[self._n] = value
        self._n += 1

    def extend(self, values: Pages) -> None:
        n = self._n + len(values)
        if n > len(self._data):
            self._grow(n)
        self._data[self._n : n] = values
        self._n = n

    def clear(self) -> None:
        self._n = 0

    def _grow(self, n: int) -> None:
        grown = np.empty(max(n, 2 * len(self._data)), dtype=np.int32)
        grown[: self._n] = self._data[: self._n]
        self._data = grown


@dataclass(slots=True)
class Timings:
    """Readings of the engine's clock in seconds; None: not yet. Written by the engine thread only."""

    queued_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    n_preemptions: int = 0
    n_output_tokens: int = 0  # of all choices


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What was submitted: immutable but for its `timings`. Known by identity, since ids may come from clients."""

    id: str
    prompt: IntArray  # (N,) read-only
    params: SamplingParams
    resolved: Resolved
    deliver: Deliver
    timings: Timings


class Stage(Enum):
    WAITING = auto()  # holds no pages
    RUNNING = auto()
    GONE = auto()  # finished or cancelled; holds no pages


@dataclass(slots=True, eq=False)
class Family:
    """The choices of one request, and the pages of their common prompt that are kept for those still waiting."""

    members: list["Sequence"] = field(default_factory=list)
    held: Pages = ()  # full pages of the computed prompt, one owner of them is this family


class Sequence:
    """Choice `index` of a request. `order` is the place in the first-come-first-served queue."""

    __slots__ = (
        "family",
        "index",
        "n_computed",
        "n_prompt",
        "order",
        "pages",
        "request",
        "sampling_row",
        "stage",
        "tokens",
    )

    def __init__(self, request: Request, index: int, family: Family) -> None:
        self.request = request
        self.index = index
        self.family = family
        self.order = (0, index)  # the scheduler sets the first part
        self.stage = Stage.WAITING
        self.tokens = IntBuffer(request.prompt)
        self.n_prompt = len(request.prompt)
        self.n_computed = 0
        self.pages = IntBuffer()
        self.sampling_row = _sampling_row(request.resolved, index)
        family.members.append(self)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.n_computed


def sequences_of(request: Request) -> list[Sequence]:
    """The choices 0 .. n-1 of a request, one family."""
    family = Family()
    return [Sequence(request, index, family) for index in range(request.resolved.n)]


def _sampling_row(resolved: Resolved, index: int) -> NDArray[np.uint8]:
    """The bytes of this choice's row of SAMPLING; what changes from step to step is filled in by the batch."""
    row = np.zeros(1, dtype=SAMPLING)
    row["choice"] = index
    row["seed"] = resolved.seed & SEED_MASK
    row["top_k"] = resolved.top_k
    row["temperature"] = resolved.temperature
    row["top_p"] = resolved.top_p
    row["min_p"] = resolved.min_p
    row["presence_penalty"] = resolved.presence_penalty
    row["frequency_penalty"] = resolved.frequency_penalty
    row["repetition_penalty"] = resolved.repetition_penalty
    row["n_top"] = -1 if resolved.n_top is None else resolved.n_top
    row["bias_count"] = len(resolved.bias_ids)
    return row.view(np.uint8)
