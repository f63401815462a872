"""What the engine loop counts, and the snapshot that health checks, metrics and admission read."""

from dataclasses import dataclass, field

from millrace.runtime.params import FinishReason

SMOOTHING = 0.1  # weight of the newest request in the mean request time


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """One moment of the loop. Totals only grow; times are in seconds."""

    running: int  # sequences that hold pages
    waiting: int  # sequences that do not: submitted or preempted
    pages_used: int
    pages_total: int
    prompt_tokens_total: int  # of requests whose prompt is computed; not counted again after a preemption
    generation_tokens_total: int
    preemptions_total: int
    steps_total: int
    step_tokens_total: int  # computed by the executor, recomputation included
    finished_total: dict[FinishReason, int]  # choices
    last_step_s: float  # since the loop last showed progress
    idle: bool  # nothing submitted, waiting or running
    healthy: bool  # False: the loop has stopped on an error
    request_time_s: float  # smoothed, from the first step of a request to its end; 0 before the first


@dataclass(slots=True)
class Counters:
    """The loop's own tallies, written by the engine thread only."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    request_time_s: float = 0.0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def request_took(self, seconds: float) -> None:
        old = self.request_time_s
        self.request_time_s = seconds if not old else old + SMOOTHING * (seconds - old)
