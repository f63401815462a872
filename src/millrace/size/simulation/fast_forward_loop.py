"""Event-driven simulation of EngineLoop on a virtual clock: the real scheduler, page pool and token budget, no tokens.

Decoding sequences only grow by a token per step. So they are touched only at events: one needs a page, fills a page
that enters the prefix index, or ends; in between only time passes. If free pages run short, every sequence is
processed in every step. A test checks that all times of all requests equal those of EngineLoop, bit for bit.
"""

from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush

from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.engine.executor import ExecutorLimits, IntArray
from millrace.runtime.kv.pages import PagePool
from millrace.runtime.request.request import AnswerText, Request, Sequence, StopTables, Timings
from millrace.runtime.request.sampling_params import ResolvedParams, SamplingParams, resolve
from millrace.runtime.scheduling.scheduler import Scheduler
from millrace.runtime.scheduling.step import Step
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.simulation.virtual_clock import TOKEN, RequestOutcome, VirtualClock

_NOTHING = StopTables(())
_Turn = tuple[int, int, int, Sequence]  # event: step, place in the order of admission, kind of event


class _NullDetokenizer:
    """A detokenizer that yields no text."""

    def push(self, ids: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _no_text() -> AnswerText:
    return AnswerText(_NullDetokenizer(), _NOTHING, False)


def _discard(_: object) -> None:
    """Drop the output of a request."""


class FastForwardLoop:
    """A simulated engine loop. ended: finished requests; steps: executed steps; after_s: host time after the last"""

    def __init__(
        self, limits: ExecutorLimits, clock: VirtualClock, seconds: StepTime, between: Callable[[int], float],
        budget: TokenBudget | None, prefix_cache: bool,
    ) -> None:  # fmt: skip
        self._limits, self._clock, self._seconds, self._between = limits, clock, seconds, between
        self._scheduler = Scheduler(limits, PagePool(limits.n_pages), clock, budget, prefix_cache)
        self._outcomes: dict[Sequence, RequestOutcome] = {}
        self._resolved = cache(self._resolve)
        self.ended = self.steps = 0
        self.after_s = 0.0
        # Decoding sequences -> the step before which their state is current; their tokens lag behind since.
        self._since: dict[Sequence, int] = {}
        self._contexts = 0  # tokens of all of them
        self._place: dict[Sequence, int] = {}
        self._n_placed = 0
        self._growing: list[_Turn] = []  # heap: before which step each needs another page
        self._turning: list[_Turn] = []  # heap: with which step a page is full (0), or the answer ends (1)

    @property
    def preemptions(self) -> int:
        return self._scheduler.n_preemptions

    @property
    def prefix_hits(self) -> int:
        return self._scheduler.n_hit

    def submit(self, prompt: IntArray, outcome: RequestOutcome) -> None:
        resolved = self._resolved(len(prompt), outcome.arrival.n_output)
        request = Request("", prompt, resolved, _discard, Timings(self._clock.now_s), _no_text)
        self._outcomes[request.choices[0]] = outcome
        self._scheduler.add(request)

    def step(self, until_s: float) -> bool:
        """Run one step, or several identical ones until the next arrival at `until_s`; False if there is no work."""
        scheduler = self._scheduler
        if not scheduler.has_work:
            return False
        if not self._is_quick():
            self._step_all()
        elif len(self._since) < len(scheduler.running) or self._may_admit:
            self._step_with_prompts()
        else:
            self._step_decode_only(until_s)
        return True

    @property
    def _may_admit(self) -> bool:
        return bool(self._scheduler.waiting) and len(self._scheduler.running) < self._limits.max_sequences

    def _is_quick(self) -> bool:
        """Whether pages suffice, and no prompt has a single token left (which the scheduler treats like decoding)."""
        n_free = self._scheduler.pool.n_free
        if n_free < len(self._since) and n_free < sum(turn[0] <= self.steps for turn in self._growing):
            return False
        if len(self._since) == len(self._scheduler.running):
            return True
        return all(seq in self._since or seq.n_left > 1 for seq in self._scheduler.running)

    def _spend(self, step: Step, n: int, contexts: int) -> None:
        """Advance the clock by a step of its chunks and n decoding sequences. contexts: their tokens before it"""
        prompts = [chunk for chunk in step.chunks if chunk.n > 1]
        singles = [chunk for chunk in step.chunks if chunk.n == 1]
        n, contexts = n + len(singles), contexts + n + sum(chunk.start + 1 for chunk in singles)
        started_s = self._clock.now_s
        self._clock.now_s += self._seconds(
            [chunk.n for chunk in prompts], [chunk.start for chunk in prompts], n, contexts / n if n else 0.0
        )
        self._scheduler.commit(step, self._clock.now_s - started_s)
        self.steps += 1

    def _rest(self, n_sequences: int) -> None:
        """Advance the clock to when the next step may begin."""
        self.after_s = self._between(n_sequences)
        self._clock.now_s += self.after_s

    def _draw(self, seq: Sequence) -> None:
        outcome = self._outcomes[seq]
        self._scheduler.publish_verified(seq)
        seq.tokens.append(TOKEN)
        if seq.n_output == 1:
            outcome.first_s = self._clock.now_s
        if seq.n_output == outcome.arrival.n_output:
            self._end(seq, outcome)

    def _end(self, seq: Sequence, outcome: RequestOutcome) -> None:
        outcome.last_s = self._clock.now_s
        self._scheduler.remove(seq)
        del self._outcomes[seq]
        self._place.pop(seq, None)
        self.ended += 1

    # ------------------------------------------------------------------ step by step

    def _step_all(self) -> None:
        """Run one step as EngineLoop does, for every sequence."""
        for seq in self._since:
            self._catch_up(seq)
        self._since, self._contexts, self._growing, self._turning, self._place = {}, 0, [], [], {}
        step = self._scheduler.schedule()
        self._spend(step, 0, 0)
        for chunk in step.chunks:
            if chunk.draws:
                self._draw(chunk.sequence)
        self._rest(len(step.chunks))
        for seq in self._scheduler.running:
            self._place_last(seq)
            if seq.n_left == 1 and seq.n_output:
                self._start_decoding(seq)

    # ------------------------------------------------------------------ events only

    def _start_decoding(self, seq: Sequence) -> None:
        """Add a sequence to the decoding ones, and schedule its events."""
        start, size, place = seq.n_computed, self._limits.page_tokens, self._place[seq]
        self._since[seq] = self.steps
        self._contexts += start
        heappush(self._growing, (self.steps + len(seq.pages) * size - start, place, 0, seq))
        heappush(self._turning, (self.steps + self._outcomes[seq].arrival.n_output - seq.n_output - 1, place, 1, seq))
        if self._scheduler.prefix_cache:
            heappush(self._turning, (self.steps + (seq.n_indexed + 1) * size - start - 1, place, 0, seq))

    def _place_last(self, seq: Sequence) -> None:
        self._n_placed += 1
        self._place[seq] = self._n_placed

    def _catch_up(self, seq: Sequence) -> None:
        n = self.steps - self._since[seq]
        self._since[seq] = self.steps
        seq.tokens.extend((TOKEN,) * n)
        seq.n_computed += n
        seq.n_finite = seq.n_computed

    def _grow(self) -> None:
        """Reserve pages for sequences that need one in the next step; events of ended sequences are skipped."""
        while self._growing and self._growing[0][0] <= self.steps:
            at, place, _, seq = heappop(self._growing)
            if seq in self._since:
                page = self._scheduler.pool.reserve(1)
                assert page is not None, "they were counted"
                seq.pages.extend(page)
                heappush(self._growing, (at + self._limits.page_tokens, place, 0, seq))

    def _handle_events(self) -> None:
        """Process the events of the last step: filled pages and finished sequences."""
        while self._turning and self._turning[0][0] < self.steps:
            at, place, ends, seq = heappop(self._turning)
            if seq not in self._since:
                continue
            self._catch_up(seq)
            if ends:
                self._contexts -= seq.n_computed
                del self._since[seq]
                self._end(seq, self._outcomes[seq])
            else:
                self._scheduler.publish_verified(seq)
                heappush(self._turning, (at + self._limits.page_tokens, place, 0, seq))

    def _step_with_prompts(self) -> None:
        """Run one step with prompt chunks, perhaps of newly admitted sequences."""
        self._grow()
        n = len(self._since)
        step = Step([], n, 0)
        self._scheduler.take_prompts(step, n, n == len(self._scheduler.running))
        for chunk in step.chunks:
            if chunk.sequence not in self._place:
                self._place_last(chunk.sequence)
        self._spend(step, n, self._contexts)
        self._contexts += n
        self._handle_events()
        for chunk in step.chunks:
            seq = chunk.sequence
            if chunk.draws:
                self._draw(seq)
                if seq in self._outcomes:
                    self._start_decoding(seq)
        self._rest(n + len(step.chunks))

    def _step_decode_only(self, until_s: float) -> None:
        """Run decode-only steps until the next event or arrival."""
        self._grow()
        budget, clock, n = self._scheduler.budget, self._clock, len(self._since)
        between_s, last = self._between(n), self._turning[0][0]  # the step with which something turns
        if self._growing:
            last = min(last, self._growing[0][0] - 1)
        for _ in range(max(0, last - self.steps) + 1):
            self._contexts += n
            started_s = clock.now_s
            clock.now_s += self._seconds((), (), n, self._contexts / n)
            budget.observe(0, clock.now_s - started_s, n)
            self.steps += 1
            if self.steps > last or clock.now_s + between_s >= until_s:
                break
            clock.now_s += between_s
        self._handle_events()
        self._rest(n)

    def _resolve(self, n_prompt: int, n_output: int) -> ResolvedParams:
        params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
        return resolve(params, GenerationDefaults(), self._limits, n_prompt)
