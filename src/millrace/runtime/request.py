"""A request, and its choices: which tokens each has, how many are computed, which pages hold them, what text they are.

A choice is a `Sequence`: prompt, then output. The scheduler moves `n_computed` towards `n_tokens`; when they meet, the
executor draws the next token and `take` puts `n_tokens` one ahead again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from millrace.engine.executor import IntArray
from millrace.runtime.pages import Pages
from millrace.runtime.params import Delta, FinishReason, TokenLogprobs
from millrace.runtime.resolve import Resolved
from millrace.runtime.stops import AnswerText, Finish, finish_by_length, finish_by_token

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


class Stage(Enum):
    WAITING = auto()  # holds no pages
    RUNNING = auto()
    GONE = auto()  # finished or cancelled; holds no pages


@dataclass(slots=True, eq=False)
class Request:
    """What was submitted, and how far it is. Known by identity, since ids may come from clients.

    first: the index of its first choice in what its reader gets, where one reader has several requests
    """

    id: str
    prompt: IntArray  # (N,) read-only
    resolved: Resolved
    deliver: Deliver
    timings: Timings
    new_text: Callable[[], AnswerText]  # of each choice
    first: int = 0
    choices: list["Sequence"] = field(init=False)
    order: int = field(init=False, default=0)  # of arrival at the scheduler
    n_scored: int = field(init=False, default=1)  # tokens of the prompt whose log probabilities need no more computing

    def __post_init__(self) -> None:
        if self.resolved.prompt_top is None:
            self.n_scored = len(self.prompt)
        self.choices = [Sequence(self, index) for index in range(self.resolved.n)]

    @property
    def is_open(self) -> bool:
        return any(seq.stage is not Stage.GONE for seq in self.choices)


class Sequence:
    """Choice `index` of a request."""

    __slots__ = ("index", "n_computed", "n_prompt", "pages", "request", "row", "stage", "text", "tokens")

    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index = request, index
        self.stage = Stage.WAITING
        self.tokens = IntBuffer(request.prompt)
        self.n_prompt = len(request.prompt)
        self.n_computed = 0
        self.pages = IntBuffer()
        self.text = request.new_text()
        row = request.resolved.row.copy()
        row["choice"] = index
        self.row = row.view(np.uint8)  # the bytes of its row of SAMPLING; what changes is filled in by the batch

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the first-come-first-served queue."""
        return self.request.order, self.index

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

    def take(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Append a drawn token, and say what that adds, and whether it ends the answer.

        A token that ends the answer counts as its last token; its text is left out, save for a stop token with
        `include_stop_str_in_output`.
        """
        self.tokens.append(token)
        n_output, resolved = self.n_output, self.request.resolved
        finish = finish_by_token(token, n_output, resolved)
        text, stop = "", None
        if finish is None or (finish.stop is not None and resolved.include_stop):
            text, stop = self.text.push(token, n_output >= resolved.min_tokens)
        if stop is not None:
            finish = finish or Finish(FinishReason.STOP, stop)
        else:
            finish = finish or finish_by_length(n_output, resolved)
            if finish is not None:
                text += self.text.flush()
        return Delta(
            index=self.request.first + self.index,
            text=text,
            token_ids=(token,),
            logprobs=None if logprobs is None else (logprobs,),
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop,
        )

    def scored(self, logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        """The next tokens of the prompt, with their log probabilities."""
        return Delta(index=self.request.first + self.index, text="", token_ids=(), prompt_logprobs=logprobs)

    def end(self, reason: FinishReason, error: str | None) -> Delta:
        """The last delta of an answer that ends without a token: aborted or failed."""
        return Delta(self.request.first + self.index, self.text.flush(), (), finish_reason=reason, error=error)
