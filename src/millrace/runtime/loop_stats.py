"""What an engine loop counts, and says of itself."""

from dataclasses import dataclass, field

from millrace.runtime.request.sampling_params import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One moment of a second tier of KV pages. Totals are of pages since the start, and only grow."""

    pages: int  # that can be found in its files
    bytes: int  # of both
    stored_total: int
    found_total: int
    damaged_total: int
    dropped_total: int  # not kept: too many came at a time, or the disk is full


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """One moment of the pages of one window."""

    tokens: int  # of the window
    pages_used: int
    pages_kept: int
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """One moment of the loop. Totals only grow; times are in seconds."""

    running: int  # sequences that hold pages
    waiting: int  # sequences that do not: submitted or preempted
    pages_used: int  # that somebody owns
    pages_kept: int  # of the others, those of which the content is known and may be found again
    pages_pinned: int  # of those used: they are kept for prompts to come
    pages_total: int
    prompt_tokens_total: int  # of requests whose prompt is computed or known; not counted again after a preemption
    generation_tokens_total: int
    preemptions_total: int
    prefix_queries_total: int  # tokens of prompts that were looked up in the prefix cache
    prefix_hits_total: int  # of these, those that were found, and so not computed
    pages_evicted_total: int
    windows: tuple[WindowStats, ...]  # of layers that attend to the last tokens alone
    tier: TierStats | None  # where there is one
    steps_total: int
    step_tokens_total: int  # computed by the executor, recomputation included
    finished_total: dict[FinishReason, int]  # choices
    last_step_s: float  # since the loop last showed progress
    idle: bool  # nothing submitted, waiting or running
    healthy: bool  # False: the loop has stopped on an error
    running_s: float  # since the first step of each that runs, of all together
    held_s_total: float  # the same, of those that ran and ended, until then
    left_total: int  # how many these are, whatever their end


@dataclass(slots=True)
class Counters:
    """A loop's own tallies, written by its thread only."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    held_s: float = 0.0
    left: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
