"""Which tokens the next step computes. No phases: each sequence has so many tokens computed and wants so many more.

First the sequences that lack one token (the running answers), then chunks of prompts in what the budget leaves, oldest
first, then new ones from the queue, first come, first served. A sequence gets the pages of all its known tokens when it
is admitted, so that only growing answers ever lack a page. Then the most recently admitted sequence gives its pages
back and waits again with its tokens: recomputing them gives the same bits (promise 1).

Nothing starves: the oldest running sequence is never preempted for another, fits into the pool alone (longer requests
were refused), so it ends; and nobody overtakes the head of the queue, save while that waits for its sibling's prompt.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError
from millrace.runtime.budget import TokenBudget
from millrace.runtime.pages import PagePool, Pages
from millrace.runtime.sequence import Sequence, Stage


@dataclass(slots=True)
class Chunk:
    """Tokens `start` .. `start + n - 1` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    n: int
    draws: bool  # the chunk reaches the sequence's last token: draw the next one


@dataclass(slots=True)
class Step:
    """T tokens in all; the chunks of running answers come first."""

    chunks: list[Chunk]
    n_tokens: int
    n_prefill: int


class Scheduler:
    """Holds every sequence that is not finished, and all page tables.

    raises ConfigError for limits under which a step could not take one token of every sequence.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        pool: PagePool,
        clock: Callable[[], float],
        budget: TokenBudget | None = None,
    ) -> None:
        if limits.max_step_tokens < limits.max_sequences:
            raise ConfigError(
                f"a step of {limits.max_step_tokens} tokens for {limits.max_sequences} sequences",
                "at least one token of each sequence",
                "lower --max-batch or build the engine for longer steps",
            )
        self.limits, self.pool, self.clock = limits, pool, clock
        self.budget = budget or TokenBudget(limits.max_step_tokens)
        self.running: list[Sequence] = []  # in order of admission
        self.waiting: list[Sequence] = []  # in order of arrival
        self.n_preemptions = 0
        self._n_arrived = 0
        self._holding: dict[int, Sequence] = {}  # id(family) -> a member, for families with held pages

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, choices: list[Sequence]) -> None:
        """Queue the choices of one request."""
        self._n_arrived += 1
        for seq in choices:
            seq.order = (self._n_arrived, seq.index)
            self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Finished, failed or cancelled: its pages go back. Harmless for one that is gone."""
        if seq.stage is Stage.RUNNING:
            self.running.remove(seq)
            self._give_back(seq)
        elif seq.stage is Stage.WAITING:
            self.waiting.remove(seq)
        seq.stage = Stage.GONE
        self._let_go_if_unneeded(seq)

    def schedule(self) -> Step:
        """The next step; empty only where there is no work."""
        step = Step([], 0, 0)
        self._take_single_tokens(step)
        room = self.budget.prefill_tokens(len(step.chunks))
        cut = [seq for seq in self.running if seq.n_left > 1]  # prompts under way, oldest first
        # Half for who comes after them, or what they leave: a short prompt does not wait for all of a long one.
        room -= self._admit(step, max(room // 2, room - sum(seq.n_left for seq in cut)))
        if len(cut) > 1 and room > 1:
            shortest = min(cut, key=lambda seq: seq.n_left)
            cut.remove(shortest)
            room -= self._take_prefill(step, shortest, room // 2)
        for seq in cut:
            if room > 0:
                room -= self._take_prefill(step, seq, room)
        assert step.chunks or not self.has_work, f"no step for {len(self.running)} + {len(self.waiting)} sequences"
        return step

    def commit(self, step: Step, step_time_s: float) -> None:
        """The step was computed; tokens are appended after this."""
        for chunk in step.chunks:
            seq = chunk.sequence
            seq.n_computed = end = chunk.start + chunk.n
            if len(seq.family.members) > 1 and chunk.start < self._n_shareable(seq) <= end:
                self._hold_prompt(seq)
        self.budget.observe(step.n_prefill, step_time_s)

    # ------------------------------------------------------------------ chunks

    def _take_single_tokens(self, step: Step) -> None:
        """One token of every sequence that lacks just one."""
        at = 0
        page_tokens = self.limits.page_tokens
        while at < len(self.running):  # preemption shortens the list from its end
            seq = self.running[at]
            at += 1
            if seq.n_left != 1:
                continue
            start = seq.n_computed
            if start >= len(seq.pages) * page_tokens and not self._grow(seq):
                break
            step.chunks.append(Chunk(seq, start, 1, True))
        step.n_tokens = len(step.chunks)

    def _take_prefill(self, step: Step, seq: Sequence, room: int) -> int:
        n = min(seq.n_left, room)
        step.chunks.append(Chunk(seq, seq.n_computed, n, n == seq.n_left))
        step.n_tokens += n
        step.n_prefill += n
        return n

    # ------------------------------------------------------------------ admission

    def _admit(self, step: Step, room: int) -> int:
        """Starts waiting sequences in their order, with at most `room` tokens; gives how many it took."""
        at, given = 0, room
        while room > 0 and at < len(self.waiting) and len(self.running) < self.limits.max_sequences:
            seq = self.waiting[at]
            shared = self._shared_prompt(seq)
            if shared is None:
                at += 1  # its sibling is computing the prompt in this very moment: let others by
                continue
            if not self._reserve_known_tokens(seq, shared):
                break
            del self.waiting[at]
            seq.stage = Stage.RUNNING
            self.running.append(seq)
            timings = seq.request.timings
            if timings.first_scheduled_s is None:
                timings.first_scheduled_s = self.clock()
            self._let_go_if_unneeded(seq)
            room -= self._take_prefill(step, seq, room)
        return given - room

    def _reserve_known_tokens(self, seq: Sequence, shared: Pages) -> bool:
        """Pages for every token that `seq` has; False, and nothing taken, when they are not there now."""
        n = -(-seq.n_tokens // self.limits.page_tokens) - len(shared)
        spare = len(self.running)  # a page of growth for each running answer, or they would soon preempt this one
        if self.pool.n_free < n + spare and self.running:
            return False
        kept = self.pool.share(shared)  # first, so that dropping held prompts cannot free them
        if self.pool.n_free < n:
            self._drop_held_prompts()
        own = self.pool.reserve(n)
        assert own is not None, f"{n} pages for the only sequence, {self.pool.n_free} of {self.pool.n_pages} free"
        seq.pages.extend(kept + own)
        seq.n_computed = len(shared) * self.limits.page_tokens
        return True

    # ------------------------------------------------------------------ shortage

    def _grow(self, seq: Sequence) -> bool:
        """One more page for `seq`, taken from the youngest if need be; False when that is `seq` itself."""
        page = self.pool.reserve(1)
        if page is None and self._holding:
            self._drop_held_prompts()
            page = self.pool.reserve(1)
        while page is None:
            victim = self.running[-1]
            assert len(self.running) > 1, "a sequence alone does not fit into the pool"
            self._preempt(victim)
            if victim is seq:
                return False
            page = self.pool.reserve(1)
        seq.pages.extend(page)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._give_back(seq)
        seq.stage = Stage.WAITING
        insort(self.waiting, seq, key=lambda s: s.order)
        seq.request.timings.n_preemptions += 1
        self.n_preemptions += 1

    def _give_back(self, seq: Sequence) -> None:
        self.pool.release(seq.pages.array.tolist())
        seq.pages.clear()
        seq.n_computed = 0

    # ------------------------------------------------------------------ the common prompt of n choices

    def _n_shareable(self, seq: Sequence) -> int:
        """Tokens in full pages of the prompt, without its last token: that must be computed to draw the next."""
        return (seq.n_prompt - 1) // self.limits.page_tokens * self.limits.page_tokens

    def _shared_prompt(self, seq: Sequence) -> Pages | None:
        """Computed pages that `seq` may share; None while a sibling is still computing them."""
        n_tokens = self._n_shareable(seq)
        if len(seq.family.members) == 1 or n_tokens == 0:
            return ()
        if seq.family.held:
            return seq.family.held
        running = [s for s in seq.family.members if s.stage is Stage.RUNNING]
        for donor in running:
            if donor.n_computed >= n_tokens:
                return tuple(donor.pages.array[: n_tokens // self.limits.page_tokens].tolist())
        return None if running else ()

    def _hold_prompt(self, seq: Sequence) -> None:
        """Keep the prompt's pages for siblings that wait: `seq` may be finished before they come."""
        family = seq.family
        if not family.held and any(s.stage is Stage.WAITING for s in family.members):
            n_pages = self._n_shareable(seq) // self.limits.page_tokens
            family.held = self.pool.share(seq.pages.array[:n_pages].tolist())
            self._holding[id(family)] = seq

    def _let_go_if_unneeded(self, seq: Sequence) -> None:
        family = seq.family
        if family.held and not any(s.stage is Stage.WAITING for s in family.members):
            self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        self.pool.release(seq.family.held)
        seq.family.held = ()
        del self._holding[id(seq.family)]

    def _drop_held_prompts(self) -> None:
        """Held pages are a convenience; a sequence that needs room goes first."""
        for seq in list(self._holding.values()):
            self._let_go(seq)
