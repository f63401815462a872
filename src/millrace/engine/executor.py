"""The executors' contract: one step in, one step out. `native`, `cuda` and `reference` are interchangeable.

A step carries packed tokens of any mix of prefill chunks and decode rows. Between steps the executor keeps only the KV
pages and states; the runtime decides which sequence owns which page.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
_SLOTS = np.arange(1 << 12, dtype=np.int32)  # more sequences than a step of an engine has
_NO_PAGES_FREED = np.zeros(1 << 12, np.int32)  # lives as long as the module: the native executor holds its address

# One row of StepInputs.sampling. `history_*` index into StepInputs.history. Neutral penalties, top_k 0, top_p 1 and
# min_p 0 cost nothing.
SAMPLING = np.dtype(
    [
        ("token", "<i4"),  # index into this step's tokens; the token after it is drawn or scored
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
        ("target", "<i4"),  # the token to score (needs n_top >= 0); -1: draw one
        ("mask", "<i4"),  # masks[mask - 1] says which tokens may be drawn; 0: all
    ],
    align=True,
)


class SampleError(IntEnum):
    """Why a row has no token; in the token's place, and the same as in native/sampling.hpp."""

    NOT_FINITE = -1  # the logits are not finite
    NOTHING_ALLOWED = -2  # the mask allows no token


def plain_rows(n: int) -> NDArray[np.void]:
    """Return rows (n,) of SAMPLING that draw the most likely token without log probabilities; `token` is still 0."""
    rows = np.zeros(n, SAMPLING)
    rows["top_p"], rows["repetition_penalty"], rows["n_top"], rows["target"] = 1, 1, -1, -1
    return rows


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages of a step's sequences in the caches of one window. Pages before the window may be released."""

    pages: IntArray  # (sum of page counts,) page ids in the window's own pool, each sequence's in order
    page_starts: IntArray  # (S+1,) like StepInputs.page_starts
    first: IntArray  # (S,) number of each sequence's first page, counted from position 0
    copies: IntArray | None = None  # (C, 2) like StepInputs.copies


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of the states of a step's sequences. A slot that a sequence writes is not used by another."""

    read: IntArray  # (S,) ignored for a sequence that starts in this step
    write: IntArray  # (S,)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of S sequences, packed: sequence s owns tokens[starts[s] : starts[s+1]]."""

    tokens: IntArray  # (T,)
    positions: IntArray  # (T,) absolute position of each token; consecutive within a sequence
    starts: IntArray  # (S+1,)
    pages: IntArray  # (sum of the sequences' page counts,) page ids, each sequence's own in order from position 0
    page_starts: (
        IntArray  # (S+1,) sequence s owns pages[page_starts[s] : page_starts[s+1]], enough for its last position
    )
    sampling: NDArray[np.void]  # (R,) of SAMPLING
    history: IntArray  # token ids for the penalties; may be empty if no row has one
    bias_ids: IntArray
    bias_values: NDArray[np.float32]
    # (M, ceil(V / 32)): bit t % 32 of word t / 32 says whether token t may be drawn; None: no row has a mask
    masks: NDArray[np.uint32] | None = None
    masks_ready: IntArray | None = None  # (1,) 0 while another thread still fills the masks; None: they are filled
    # (C, 2) source and target: pages copied before the step, into pages of this step's sequences
    copies: IntArray | None = None
    # (D, 2): a token of this step, and the row of the previous step that draws it; None: all are known
    pending_tokens: IntArray | None = None
    # (E, 2): an index into `history`, and the row of the previous step that draws its token
    pending_history: IntArray | None = None
    # (E, width): token -1 - e uses row e instead of a row of the embedding table; None: all tokens are ids
    embeddings: NDArray[np.float32] | None = None
    rotary_positions: IntArray | None = None  # (T,) positions for the rotary embedding; None: `positions`
    adapters: IntArray | None = None  # (S,) 0: none, otherwise one of the executor's n_adapters; None: all 0
    states: "StateSlots | None" = None  # None: sequence s has slot s, or the executor keeps no states
    windows: tuple[WindowPages, ...] = ()  # one per ExecutorLimits.windows; (): all use `pages`, and none was released

    def windows_of(self, limits: "ExecutorLimits") -> "tuple[WindowPages, ...]":
        """Return `windows` or, if it is empty, the step's own pages for each window of the executor."""
        if self.windows or not limits.windows:
            return self.windows
        first = _NO_PAGES_FREED[: len(self.starts) - 1]
        return (WindowPages(self.pages, self.page_starts, first, self.copies),) * len(limits.windows)

    def adapters_of_tokens(self) -> IntArray:
        """Return the adapter of each token (T,)."""
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
        """Return `masks`, which must exist, after they are filled."""
        assert self.masks is not None, "a mask of none"
        while self.masks_ready is not None and not self.masks_ready[0]:
            time.sleep(20e-6)
        return self.masks


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One entry per sampling row. A row whose logits are not finite, or whose mask allows no token, has a SampleError.

    Only the request of that row fails.
    """

    tokens: IntArray  # (R,)
    logprobs: NDArray[np.float32]  # (R,) natural log of the unmodified distribution (after the mask)
    ranks: IntArray  # (R,) rank of the chosen token; 1: most likely
    top_ids: IntArray  # (R, max n_top of this step), best first; -1 after the last that a mask allows
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """The caches of layers that attend to the last `tokens`, and the number of their pages."""

    tokens: int
    n_pages: int


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """The limits that the engine was built with; the scheduler respects them."""

    max_step_tokens: int  # maximum of T
    max_sequences: int  # maximum of S
    max_rows: int  # maximum of R
    max_context: int  # positions 0 .. max_context-1
    page_tokens: int  # tokens per KV page
    n_pages: int  # KV pages, ids 0 .. n_pages-1
    vocab_size: int
    on_all_cores: bool = False  # it computes on every core that this process may use
    windows: tuple[WindowLimits, ...] = ()
    n_slots: int = 0  # for states; 0: the model has none
    embedding_width: int = 0  # of the embedding rows that a step may have; 0: it takes none
    n_adapters: int = 0  # adapters of sequences, numbered from 1
    context_tokens: int = field(init=False)  # of one sequence: max_context, or all KV pages if they hold less

    def __post_init__(self) -> None:
        object.__setattr__(self, "context_tokens", min(self.max_context, self.n_pages * self.page_tokens))


class ExecutionError(RuntimeError):
    """A step or a run was refused or failed; the message gives the reason."""


class Executor(ABC):
    """Runs steps. At most `depth` steps are in flight; they are computed in the order of their launch."""

    limits: ExecutorLimits
    depth: int = 1  # if more than 1, a step may use tokens that the previous one draws

    @abstractmethod
    def launch(self, step: StepInputs) -> None:
        """Start a step: compute it, store keys and values of its tokens, draw or score its sampling rows.

        The caller must not change the inputs before `wait`. raises ExecutionError if the step is illegal
        """

    @abstractmethod
    def wait(self) -> StepOutputs:
        """Return the outputs of the oldest launched step. raises RuntimeError, MillraceError if it failed"""

    @abstractmethod
    def close(self) -> None: ...

    def run(self, step: StepInputs) -> StepOutputs:
        """Launch one step and wait for it."""
        self.launch(step)
        return self.wait()
