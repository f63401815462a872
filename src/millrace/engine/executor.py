"""The executors' contract: one step in, one step out. `native`, later `cuda`, interchangeable.

A step carries packed tokens of any mix of prefill chunks and decode rows. The executor keeps the KV pages (which page
belongs to whom is the runtime's business) and nothing else between steps.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

# One row of StepInputs.sampling. `history_*` index into StepInputs.history; all penalties at their neutral
# values, top_k 0, top_p 1 and min_p 0 cost nothing.
SAMPLING = np.dtype(
    [
        ("sequence", "<i4"),  # index into this step's sequences: sample after its last token of this step
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
    ],
    align=True,
)


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


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One entry per sampling row. A row whose logits are not finite has token -1: only that request failed."""

    tokens: IntArray  # (R,)
    logprobs: NDArray[np.float32]  # (R,) natural log, of the raw distribution before penalties and temperature
    ranks: IntArray  # (R,) rank of the chosen token, 1 = likeliest
    top_ids: IntArray  # (R, max n_top of this step), best first
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What the engine was planned for; the scheduler keeps inside it."""

    max_step_tokens: int  # T at most
    max_sequences: int  # S and R at most
    max_context: int  # positions 0 .. max_context-1
    page_tokens: int  # tokens in one KV page
    n_pages: int  # KV pages in all, ids 0 .. n_pages-1
    vocab_size: int


class Executor(Protocol):
    @property
    def limits(self) -> ExecutorLimits: ...

    def run(self, step: StepInputs) -> StepOutputs:
        """Compute one step, store keys and values of its tokens, and draw the asked-for tokens. Releases the GIL."""
        ...

    def close(self) -> None: ...
