"""The executors' contract: one step in, one step out. `native`, later `cuda`, interchangeable.

A step carries packed tokens of any mix of prefill chunks and decode rows. The executor keeps the KV pages (which page
belongs to whom is the runtime's business) and nothing else between steps.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
NOT_FINITE, NOTHING_ALLOWED = -1, -2  # in place of a token
_SLOTS = np.arange(1 << 12, dtype=np.int32)  # more sequences than a step of an engine has
_NO_PAGES_FREED = np.zeros(1 << 12, np.int32)  # of module lifetime: the native core gets its address

# One row of StepInputs.sampling. `history_*` index into StepInputs.history; all penalties at their neutral
# values, top_k 0, top_p 1 and min_p 0 cost nothing.
SAMPLING = np.dtype(
    [
        ("token", "<i4"),  # index into this step's tokens: what follows it is drawn, or scored
        ("choice", "<i4"),  # n-th choice of the request; part of the random key
        ("seed", "<u8"),
        ("position", "<i4"),  # position of the token to be drawn; part of the random key
        ("top_k", "<i4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("repetition_penalty", "<f4"),
        ("n_top", "<i4"),  # alternatives to report; -1: no log probabilities at all
        ("history_start", "<i4"),  # history[start : start+prompt] is the prompt, then the output so far
        ("history_prompt", "<i4"),
        ("history_output", "<i4"),
        ("bias_start", "<i4"),  # bias_ids/bias_values[start : start+count]
        ("bias_count", "<i4"),
        ("target", "<i4"),  # the token whose log probability is wanted (n_top >= 0); -1: one is drawn
        ("mask", "<i4"),  # what may be drawn: masks[mask - 1]; 0: everything
    ],
    align=True,
)


def plain_rows(n: int) -> NDArray[np.void]:
    """(n,) of SAMPLING that draw the likeliest token and say no more of it. Which token each follows is filled in."""
    rows = np.zeros(n, SAMPLING)
    rows["top_p"], rows["repetition_penalty"], rows["n_top"], rows["target"] = 1, 1, -1, -1
    return rows


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages of a step's sequences in the caches of one window: those before it may be gone."""

    pages: IntArray  # (sum of page counts,) ids among the window's own, each sequence's in order
    page_starts: IntArray  # (S+1,) as StepInputs'
    first: IntArray  # (S,) which page of its sequence each sequence's first is, counted from position 0
    copies: IntArray | None = None  # (C, 2) as StepInputs'


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of the states of a step's sequences. A slot that a sequence writes is not read or written by another."""

    read: IntArray  # (S,) ignored if the sequence starts in this step
    write: IntArray  # (S,)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of S sequences, packed: sequence s owns tokens[starts[s] : starts[s+1]]."""

    tokens: IntArray  # (T,)
    positions: IntArray  # (T,) absolute position of each token in its sequence, consecutive within a sequence
    starts: IntArray  # (S+1,)
    pages: IntArray  # (sum of the sequences' page counts,) page ids, each sequence's own in order from position 0
    page_starts: (
        IntArray  # (S+1,) sequence s owns pages[page_starts[s] : page_starts[s+1]], enough for its last position
    )
    sampling: NDArray[np.void]  # (R,) of SAMPLING
    history: IntArray  # token ids for the penalties; may be empty where no row has one
    bias_ids: IntArray
    bias_values: NDArray[np.float32]
    # (M, ceil(V / 32)): bit t % 32 of word t / 32 says whether token t may be drawn; None: no row has a mask
    masks: NDArray[np.uint32] | None = None
    masks_ready: IntArray | None = None  # (1,) 0 as long as another thread still fills them; None: they are filled
    # (C, 2) from and to: full pages that are copied into others, of this step's sequences, before anything is stored
    copies: IntArray | None = None
    # (D, 2): a token of this step, and the row of the step launched before it that draws it; None: all are known
    pending_tokens: IntArray | None = None
    # (E, 2): a place in `history`, and the row of that step that draws what stands there
    pending_history: IntArray | None = None
    # (E, width): token -1 - e uses row e instead of a row of the embedding table; None: all tokens are ids
    embeddings: NDArray[np.float32] | None = None
    rotary_positions: IntArray | None = None  # (T,) by which queries and keys are rotated; None: `positions`
    adapters: IntArray | None = None  # (S,) 0: the model as it is, else one of the executor's n_adapters; None: all 0
    states: "StateSlots | None" = None  # of an executor that keeps states; None: sequence s has slot s
    windows: tuple[WindowPages, ...] = ()  # one per ExecutorLimits.windows; (): all use `pages`, none was freed

    def windows_of(self, limits: "ExecutorLimits") -> "tuple[WindowPages, ...]":
        """Return `windows` or, if it is empty, the step's own pages for each window of the executor."""
        if self.windows or not limits.windows:
            return self.windows
        first = _NO_PAGES_FREED[: len(self.starts) - 1]
        return (WindowPages(self.pages, self.page_starts, first, self.copies),) * len(limits.windows)

    def adapters_of_tokens(self) -> IntArray:
        """(T,): the adapter of each token's sequence."""
        lengths = np.diff(self.starts)
        own = np.zeros(len(lengths), np.int32) if self.adapters is None else self.adapters
        return np.repeat(own, lengths)

    def states_of(self, limits: "ExecutorLimits") -> "StateSlots | None":
        """Return `states`, or slot s for sequence s if unset; None if the executor keeps no states."""
        if self.states is None and limits.n_slots:
            own = _SLOTS[: len(self.starts) - 1]
            return StateSlots(own, own)
        return self.states

    def filled_masks(self) -> NDArray[np.uint32]:
        """`masks`, of a step that has some, as soon as they are filled."""
        assert self.masks is not None, "a mask of none"
        while self.masks_ready is not None and not self.masks_ready[0]:
            time.sleep(20e-6)
        return self.masks


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One entry per sampling row. Where its logits are not finite, or its mask allows nothing, the token is NOT_FINITE
    or NOTHING_ALLOWED: only that request failed."""

    tokens: IntArray  # (R,)
    logprobs: NDArray[np.float32]  # (R,) natural log, of the raw distribution (of what the mask allows) before all else
    ranks: IntArray  # (R,) rank of the chosen token, 1 = likeliest
    top_ids: IntArray  # (R, max n_top of this step), best first; -1 behind the last that a mask allows
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """The caches of layers that attend to the last `tokens` alone, and how many pages of their own these have."""

    tokens: int
    n_pages: int


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What the engine was planned for; the scheduler keeps inside it."""

    max_step_tokens: int  # T at most
    max_sequences: int  # S at most
    max_rows: int  # R at most
    max_context: int  # positions 0 .. max_context-1
    page_tokens: int  # tokens in one KV page
    n_pages: int  # KV pages in all, ids 0 .. n_pages-1
    vocab_size: int
    on_all_cores: bool = False  # it computes on every core that this process may use
    windows: tuple[WindowLimits, ...] = ()
    n_slots: int = 0  # of states, that layers keep of each sequence; 0: there are none
    embedding_width: int = 0  # of the embedding rows that a step may bring; 0: it takes none
    n_adapters: int = 0  # that a sequence may choose from, by the numbers from 1 on
    context_tokens: int = field(init=False)  # of one sequence: max_context, or all KV pages where those hold less

    def __post_init__(self) -> None:
        object.__setattr__(self, "context_tokens", min(self.max_context, self.n_pages * self.page_tokens))


class ExecutionError(RuntimeError):
    """A step or a run was refused or failed; the message says why."""


class Executor(ABC):
    """At most `depth` launched steps are not waited for; what a later one computes comes after the earlier ones'."""

    limits: ExecutorLimits
    depth: int = 1  # with more, the tokens of a step may be ones that the step before it draws

    @abstractmethod
    def launch(self, step: StepInputs) -> None:
        """Begin a step: compute it, store keys and values of its tokens, draw or score what its rows ask for.

        The inputs stay as they are until `wait`. raises ExecutionError where the step is illegal
        """

    @abstractmethod
    def wait(self) -> StepOutputs:
        """What the oldest launched step gave. raises RuntimeError, MillraceError where it failed"""

    @abstractmethod
    def close(self) -> None: ...

    def run(self, step: StepInputs) -> StepOutputs:
        """One step alone: for measurements, and wherever nothing is to be done meanwhile."""
        self.launch(step)
        return self.wait()
