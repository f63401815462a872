"""Counters and statistics of an engine loop."""

from dataclasses import dataclass, field

from millrace.runtime.request.sampling_params import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A snapshot of the KV offload store. Totals count pages since the start, and only grow."""

    pages: int  # that can be found in its files
    bytes: int  # of both files
    stored_total: int
    found_total: int
    damaged_total: int
    dropped_total: int  # not stored, because too many came at a time or the disk is full


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """A snapshot of the pages of one window."""

    tokens: int  # of the window
    pages_used: int
    pages_kept: int
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """A snapshot of the loop. Totals only grow; times are in seconds."""

    running: int  # sequences that hold pages
    waiting: int  # sequences that do not: submitted or preempted
    pages_used: int  # that have an owner
    pages_kept: int  # without an owner, but still in the prefix cache
    pages_pinned: int  # of those used: held for future prompts
    pages_total: int
    prompt_tokens_total: int  # of requests whose prompt is computed or known; not counted again after a preemption
    generation_tokens_total: int
    preemptions_total: int
    prefix_queries_total: int  # prompt tokens looked up in the prefix cache
    prefix_hits_total: int  # of these, tokens found there, and so not computed
    pages_evicted_total: int
    windows: tuple[WindowStats, ...]  # of sliding-window layers
    tier: TierStats | None  # None without KV offload
    steps_total: int
    step_tokens_total: int  # computed by the executor, recomputation included
    finished_total: dict[FinishReason, int]  # choices
    last_step_s: float  # since the loop last showed progress
    idle: bool  # nothing submitted, waiting or running
    healthy: bool  # False: the loop has stopped on an error
    running_s: float  # total time since their first step of the sequences that run
    held_s_total: float  # the same for sequences that ran and ended, until their end
    left_total: int  # number of these, however they ended


@dataclass(slots=True)
class Counters:
    """Counters of a loop, written by its thread only."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    running_s: float = 0.0
    left: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
