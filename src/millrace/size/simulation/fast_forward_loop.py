"""The loop without texts, on a virtual clock: the scheduler, pages and budget that serve, in the order of EngineLoop.

Running answers are alike from step to step: each grows by a token. So nothing is done for them but at their turns, when
one needs a page, has a full one that others may find, or ends; between these only time passes. Where pages lack, all is
done step by step. A test holds every time of every request equal, bit for bit, to that of EngineLoop.
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
_Turn = tuple[int, int, int, Sequence]  # step, place in the order of admission, which of its turns


class _NullDetokenizer:
    """Answers' texts are not looked at."""

    def push(self, ids: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _no_text() -> AnswerText:
    return AnswerText(_NullDetokenizer(), _NOTHING, False)


def _nobody(_: object) -> None:
    """No one reads along."""


class FastForwardLoop:
    """ended: requests so far; steps: that were taken; after_s: what the host took after the last of them"""

    def __init__(
        self, limits: ExecutorLimits, clock: VirtualClock, seconds: StepTime, between: Callable[[int], float],
        budget: TokenBudget | None, prefix_cache: bool,
    ) -> None:  # fmt: skip
        self._limits, self._clock, self._seconds, self._between = limits, clock, seconds, between
        self._scheduler = Scheduler(limits, PagePool(limits.n_pages), clock, budget, prefix_cache)
        self._seen: dict[Sequence, RequestOutcome] = {}
        self._resolved = cache(self._resolve)
        self.ended = self.steps = 0
        self.after_s = 0.0
        # Running answers: what is known of each was true before that step. Their tokens lag behind since.
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

    def submit(self, prompt: IntArray, seen: RequestOutcome) -> None:
        resolved = self._resolved(len(prompt), seen.arrival.n_output)
        request = Request("", prompt, resolved, _nobody, Timings(self._clock.now_s), _no_text)
        self._seen[request.choices[0]] = seen
        self._scheduler.add(request)

    def step(self, until_s: float) -> bool:
        """One step, or as many as are alike before somebody comes at `until_s`; False where there is no work."""
        scheduler = self._scheduler
        if not scheduler.has_work:
            return False
        if not self._is_quick():
            self._plainly()
        elif len(self._since) < len(scheduler.running) or self._may_admit:
            self._beside_prompts()
        else:
            self._running_alone(until_s)
        return True

    @property
    def _may_admit(self) -> bool:
        return bool(self._scheduler.waiting) and len(self._scheduler.running) < self._limits.max_sequences

    def _is_quick(self) -> bool:
        """Pages are there for who needs one now, and no prompt has one token left, which would run as answers do."""
        n_free = self._scheduler.pool.n_free
        if n_free < len(self._since) and n_free < sum(turn[0] <= self.steps for turn in self._growing):
            return False
        if len(self._since) == len(self._scheduler.running):
            return True
        return all(seq in self._since or seq.n_left > 1 for seq in self._scheduler.running)

    def _spend(self, step: Step, n: int, contexts: int) -> None:
        """Time for its chunks and n running answers, whose contexts have so many tokens together before it."""
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
        """Until the next step may begin."""
        self.after_s = self._between(n_sequences)
        self._clock.now_s += self.after_s

    def _draw(self, seq: Sequence) -> None:
        seen = self._seen[seq]
        self._scheduler.verified(seq)
        seq.tokens.append(TOKEN)
        if seq.n_output == 1:
            seen.first_s = self._clock.now_s
        if seq.n_output == seen.arrival.n_output:
            self._end(seq, seen)

    def _end(self, seq: Sequence, seen: RequestOutcome) -> None:
        seen.last_s = self._clock.now_s
        self._scheduler.remove(seq)
        del self._seen[seq]
        self._place.pop(seq, None)
        self.ended += 1

    # ------------------------------------------------------------------ step by step

    def _plainly(self) -> None:
        """As EngineLoop does, for every sequence."""
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
                self._joins(seq)

    # ------------------------------------------------------------------ only what has its turn

    def _joins(self, seq: Sequence) -> None:
        """The running answers, as far as it is."""
        start, size, place = seq.n_computed, self._limits.page_tokens, self._place[seq]
        self._since[seq] = self.steps
        self._contexts += start
        heappush(self._growing, (self.steps + len(seq.pages) * size - start, place, 0, seq))
        heappush(self._turning, (self.steps + self._seen[seq].arrival.n_output - seq.n_output - 1, place, 1, seq))
        if self._scheduler.prefix_cache:
            heappush(self._turning, (self.steps + (seq.n_known + 1) * size - start - 1, place, 0, seq))

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
        """Pages for who needs one in the next step; those that have left are passed over."""
        while self._growing and self._growing[0][0] <= self.steps:
            at, place, _, seq = heappop(self._growing)
            if seq in self._since:
                page = self._scheduler.pool.reserve(1)
                assert page is not None, "they were counted"
                seq.pages.extend(page)
                heappush(self._growing, (at + self._limits.page_tokens, place, 0, seq))

    def _turn(self) -> None:
        """What the step that was taken fills, and ends."""
        while self._turning and self._turning[0][0] < self.steps:
            at, place, ends, seq = heappop(self._turning)
            if seq not in self._since:
                continue
            self._catch_up(seq)
            if ends:
                self._contexts -= seq.n_computed
                del self._since[seq]
                self._end(seq, self._seen[seq])
            else:
                self._scheduler.verified(seq)
                heappush(self._turning, (at + self._limits.page_tokens, place, 0, seq))

    def _beside_prompts(self) -> None:
        """A step with chunks of prompts, perhaps of new ones."""
        self._grow()
        n = len(self._since)
        step = Step([], n, 0)
        self._scheduler.take_prompts(step, n, n == len(self._scheduler.running))
        for chunk in step.chunks:
            if chunk.sequence not in self._place:
                self._place_last(chunk.sequence)
        self._spend(step, n, self._contexts)
        self._contexts += n
        self._turn()
        for chunk in step.chunks:
            seq = chunk.sequence
            if chunk.draws:
                self._draw(seq)
                if seq in self._seen:
                    self._joins(seq)
        self._rest(n + len(step.chunks))

    def _running_alone(self, until_s: float) -> None:
        """Steps of running answers, until one has its turn or somebody comes."""
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
        self._turn()
        self._rest(n)

    def _resolve(self, n_prompt: int, n_output: int) -> ResolvedParams:
        params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
        return resolve(params, GenerationDefaults(), self._limits, n_prompt)
