"""Which tokens the next step computes. No phases: each sequence has computed and pending tokens.

A step takes first the sequences that lack one token (the running answers), then chunks of prompts within the rest of
the budget, oldest first, then new sequences from the queue, first come, first served. A sequence gets the pages of all
its known tokens when it is admitted, so only growing answers can run out of pages. Then the most recently admitted
sequence (of those with the highest priority number) is preempted: it releases its pages and waits again with its
tokens, and recomputing them gives the same bits. If requests have priorities or tenants, or another policy
is set, `admission_policy.py` orders the queue.

Nothing starves: the first of the running sequences is never preempted for another and fits into the pool alone (longer
requests are refused), so it ends; and no sequence overtakes the head of the queue, unless the head waits for a prompt
with the same beginning.

A full page enters the prefix index when a finite token was drawn from it (`publish_verified`). A newly admitted
sequence finds the pages that earlier requests, its siblings, or itself before a preemption have computed; it copies a
page that it shares only in part. If two sequences with the same beginning arrive together, the second waits for the
first if that is faster. A prompt whose log probabilities are requested needs a row of logits per token, computed by its
first choice, and its chunks are limited by the rows that are left.
"""

import math
from bisect import insort
from collections.abc import Callable

from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError
from millrace.runtime.kv.cache_groups import NO_CACHES, CacheGroups
from millrace.runtime.kv.pages import Key, PageKey, PagePool, Pages, root_key
from millrace.runtime.kv.prefix_retention import Retention
from millrace.runtime.request.queue_options import DEFAULT_QUEUE_OPTIONS
from millrace.runtime.request.request import Request, Sequence, Stage
from millrace.runtime.scheduling.admission_policy import AdmissionQueue, Policy, fcfs
from millrace.runtime.scheduling.step import Chunk, Step
from millrace.runtime.scheduling.token_budget import TokenBudget


class Scheduler:
    """Holds every sequence that is not finished, and all page tables.

    raises ConfigError for limits under which a step could not take one token of every sequence.
    """

    def __init__(
        self,
        limits: ExecutorLimits, pool: PagePool, clock: Callable[[], float], budget: TokenBudget | None = None,
        prefix_cache: bool = True, policy: Policy = fcfs,
    ) -> None:  # fmt: skip
        """prefix_cache: whether requests share pages; if not, only the choices of one request do

        policy: which waiting sequence is admitted first
        """
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
        self.prefix_cache = prefix_cache
        self.n_preemptions = 0
        self.n_queried = self.n_hit = 0  # prompt tokens looked up in the prefix cache, and found there
        self._n_arrived = 0
        self.groups = CacheGroups(limits)
        self._order = AdmissionQueue(
            policy, clock, lambda seq: len(self._find(self._findable(seq))) * limits.page_tokens
        )
        self.retention = Retention(limits, pool, clock, prefix_cache)
        self._leading: dict[Key, Sequence] = {}  # by the first page of its prompt that it computes itself

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue the choices of a request."""
        self._n_arrived += 1
        request.order = self._n_arrived
        if request.queue_options != DEFAULT_QUEUE_OPTIONS or not self._order.is_plain:
            self._order.add(request, (seq.request for seq in (*self.waiting, *self.running)))
        if not self.prefix_cache:  # its page keys then begin with a root that no other request has
            request.root = root_key(request.order.to_bytes(8, "little"))
        self.waiting += request.choices

    def remove(self, seq: Sequence) -> None:
        """Remove a finished, failed or canceled sequence and release its pages. Does nothing if it is gone already."""
        if seq.stage is Stage.RUNNING:
            self.running.remove(seq)
            self._give_back(seq)
        elif seq.stage is Stage.WAITING:
            self.waiting.remove(seq)
        seq.stage = Stage.GONE
        if seq.request.has_retention and not seq.request.is_open:
            self.retention.withdraw(seq.request)

    @property
    def next_expiry_s(self) -> float | None:
        """Seconds until the first pin or priority may expire; None if none does."""
        end_s = min(self.retention.pins.next_end_s, self.pool.index.next_end_s)
        return None if end_s == math.inf else max(0.0, end_s - self.clock())

    def expire(self) -> None:
        """End the pins and priorities that have expired."""
        if self.next_expiry_s == 0:
            self.retention.expire()

    def overdue(self) -> list[Request]:
        """Return the requests that have exceeded their queue timeout; the caller ends them."""
        return [] if self._order.is_plain else self._order.overdue(self.waiting)

    def schedule(self) -> Step:
        """Return the next step; empty only if there is no work, or none until a launched step has drawn its tokens."""
        step = Step([], 0, 0)
        self._take_single_tokens(step)
        self.take_prompts(step, len(step.chunks), len(step.chunks) == len(self.running))
        is_due = self.has_work and not any(seq.n_ahead for seq in self.running)
        assert step.chunks or not is_due, f"no step for {len(self.running)} + {len(self.waiting)} sequences"
        return step

    def take_prompts(self, step: Step, n_running: int, all_run: bool = False) -> None:
        """Add chunks of prompts to a step with `n_running` answers, and admit sequences from the queue.

        all_run: the caller knows that no admitted prompt is unfinished
        """
        n_pending = len(self.running) - n_running + len(self.waiting)
        room = self.budget.prefill_tokens(n_running, min(n_pending, self.limits.max_sequences - n_running))
        cut = [] if all_run else [seq for seq in self.running if seq.n_left > 1]  # unfinished prompts, oldest first
        # Half for sequences that come after them, or what they leave: a short prompt does not wait for all of a long
        # one.
        room -= self._admit(step, max(room // 2, room - sum(seq.n_left for seq in cut)))
        if len(cut) > 1 and room > 1:
            shortest = min(cut, key=lambda seq: seq.n_left)
            cut.remove(shortest)
            room -= self._take_prefill(step, shortest, room // 2)
        for seq in cut:
            if room > 0:
                room -= self._take_prefill(step, seq, room)

    @property
    def must_preempt(self) -> bool:
        """Whether the next step must preempt a sequence to get pages."""
        size, n_free = self.limits.page_tokens, self.pool.n_free
        if n_free >= len(self.running):  # one for each
            return False
        return n_free < sum(seq.n_computed >= len(seq.pages) * size and seq.n_left == 1 for seq in self.running)

    def commit(self, step: Step, step_time_s: float) -> None:
        """Account for a computed step. Drawn tokens are appended after this."""
        self.advance(step)
        self.budget.observe(step.n_prefill, step_time_s, step.n_tokens - step.n_prefill)

    def run_ahead(self, step: Step) -> None:
        """Account for a launched step, so that the next one can be scheduled. It must be one that `can_run_ahead`."""
        self.advance(step)
        for chunk in step.chunks:
            chunk.sequence.n_ahead += chunk.draws

    def roll_back(self, step: Step) -> None:
        """Undo `run_ahead` for a failed step. Later steps were undone before, and no pages were released since."""
        for chunk in step.chunks:
            if chunk.sequence.stage is Stage.RUNNING:
                chunk.sequence.n_computed = chunk.start
                chunk.sequence.n_ahead -= chunk.draws
                chunk.sequence.request.n_scored -= chunk.n_scored

    def advance(self, step: Step) -> None:
        """Count the step's chunks as computed."""
        for chunk in step.chunks:
            seq = chunk.sequence
            if seq.source is not None:
                self._drop_source(seq)
            seq.n_computed = chunk.start + chunk.n
            if self.groups:
                self.groups.commit(seq.caches)
            if chunk.n_scored:
                seq.request.n_scored += chunk.n_scored
        if not self._order.is_plain:
            for chunk in step.chunks:
                self._order.record_tokens(chunk.sequence, chunk.n - chunk.draws, chunk.draws)

    # ------------------------------------------------------------------ chunks

    def _take_single_tokens(self, step: Step) -> None:
        """Add one token of every sequence that lacks just one."""
        page_tokens = self.limits.page_tokens
        ranked = list(self.running) if self._order.is_plain else self._order.by_retention(self.running)
        for seq in ranked:  # preemption takes from the end of it
            if seq.stage is not Stage.RUNNING or seq.n_left != 1:
                continue
            if seq.n_ahead and seq.matcher is not None:
                continue  # its mask depends on a token that is not known yet
            start = seq.n_computed
            if start >= len(seq.pages) * page_tokens and not self._grow(seq, ranked):
                break
            if self.groups:
                self._advance_groups(seq, start, 1)
            step.chunks.append(Chunk(seq, start, 1, True))
        step.n_tokens = len(step.chunks)

    def _take_prefill(self, step: Step, seq: Sequence, room: int) -> int:
        """Add a chunk of a prompt and return its tokens; 0 only if all rows for scores are taken."""
        start, n, n_scored = seq.n_computed, min(seq.n_left, room), 0
        if self.groups and self._n_public(seq):
            n = self.groups.chunk_length(start, n, n == seq.n_left)
        if seq.index == 0 and (first := seq.request.n_scored) < seq.n_prompt:  # its row is that of the previous token
            rows = self._rows_for(seq, step)
            n_scored = max(0, min(min(start + n, seq.n_prompt - 1) - first + 1, rows))
            if start + n < seq.n_prompt or n_scored == rows:
                n = min(n, first - 1 + n_scored - start)
        if n > 0:
            if self.groups:
                self._advance_groups(seq, start, n)
            step.chunks.append(Chunk(seq, start, n, n == seq.n_left, n_scored))
            step.n_tokens += n
            step.n_prefill += n
            step.n_scored += n_scored
        return n

    def _advance_groups(self, seq: Sequence, start: int, n: int) -> None:
        """Allocate the window pages and the state slot of a chunk; release pages before its window."""
        size, n_public = self.limits.page_tokens, min(self._n_public(seq), start)

        def key_of(number: int) -> Key | None:
            return seq.page_keys(number + 1, size)[number] if (number + 1) * size <= n_public else None

        self.groups.advance(seq.caches, start, n, key_of)

    def _rows_for(self, seq: Sequence, step: Step) -> int:
        """Return the rows of logits for scores: all for the oldest scored prompt, half for others, so it proceeds."""
        oldest = next((s for s in self.running if s.index == 0 and s.request.n_scored < s.n_prompt), seq)
        rows = self.limits.max_rows - self.limits.max_sequences - step.n_scored
        return rows if seq is oldest else rows // 2

    # ------------------------------------------------------------------ admission

    def _admit(self, step: Step, room: int) -> int:
        """Start waiting sequences in order, with at most `room` tokens; return the tokens taken."""
        granted = room
        if len(self.running) >= self.limits.max_sequences:
            return 0  # before sorting the queue
        for seq in list(self.waiting) if self._order.is_plain else self._order.ordered(self.waiting):
            if room <= 0 or len(self.running) >= self.limits.max_sequences:
                break
            shared = self._known_prefix(seq)
            if shared is None:
                continue  # its prefix is being computed now: let the next ones pass
            if not self._reserve_known_tokens(seq, shared):
                break
            self.waiting.remove(seq)
            seq.stage = Stage.RUNNING
            self.running.append(seq)
            self._lead(seq)
            if seq.request.timings.first_scheduled_s is None:
                self._begin(seq.request, min(seq.n_computed, seq.n_prompt))
            room -= self._take_prefill(step, seq, room)
        return granted - room

    def _begin(self, request: Request, n_cached: int) -> None:
        request.timings.first_scheduled_s = self.clock()
        if self.prefix_cache:
            request.n_cached = n_cached
            self.n_queried += len(request.prompt)
            self.n_hit += n_cached

    def _reserve_known_tokens(self, seq: Sequence, shared: Pages) -> bool:
        """Reserve pages for every token of `seq`. Return False, and take nothing, if they are not free."""
        n = -(-seq.n_tokens // self.limits.page_tokens) - len(shared)
        if self.groups and not self.groups.has_room(seq.max_computed):
            return False
        spare = len(self.running)  # a page of growth for each running answer, which would soon preempt this one
        pages = self.pool.share(shared)  # first: they may be free, and must not be reserved for others
        if self.pool.n_free < n + spare and self.running:
            self.pool.release(pages)
            return False
        pages = self.pool.promote(self._findable(seq), pages, lambda i: seq.content(i, self.limits.page_tokens))
        n -= len(pages) - len(shared)
        seq.n_indexed, seq.n_computed = len(pages), len(pages) * self.limits.page_tokens
        if self.groups:
            seq.caches = self.groups.start(seq.page_keys(len(pages), self.limits.page_tokens), seq.max_computed)
        seq.n_computed += self._share_part(seq, n)
        own = self.pool.reserve(n)
        assert own is not None, f"{n} pages for the only sequence, {self.pool.n_free} of {self.pool.n_pages} free"
        seq.pages.extend(pages + own)
        return True

    def _share_part(self, seq: Sequence, n: int) -> int:
        """Return how many tokens after its known pages are copied from another page; `n` pages must stay free."""
        if seq.index == 0 and seq.request.n_scored < seq.n_prompt:
            return 0  # its next step may have no row of logits for this page, and so not include it
        n_most = max(0, min(seq.n_tokens - 1, self._n_public(seq)))  # the last token is always computed
        result = self.pool.index.find_part(seq.content(seq.n_indexed, self.limits.page_tokens, n_most))
        if result is None:
            return 0
        page, n_shared = result
        if self.groups and not self.groups.share_partial_page(seq.caches, self.pool.index.key_of(page)):
            return 0
        self.pool.share((page,))  # held until the step that copies it, so that it is not reused meanwhile
        if self.pool.n_free < n:
            self.pool.release((page,))
            self.groups.drop_sources(seq.caches)
            return 0
        seq.source = page
        return n_shared

    def _drop_source(self, seq: Sequence) -> None:
        if seq.source is not None:
            self.pool.release((seq.source,))
            seq.source = None
            self.groups.drop_sources(seq.caches)

    # ------------------------------------------------------------------ shortage

    def _grow(self, seq: Sequence, ranked: list[Sequence]) -> bool:
        """Add a page to `seq`, preempting the last sequence if necessary. Return False if that is `seq` itself."""
        page = self.pool.reserve(1)
        while page is None:
            victim = next(last for last in reversed(ranked) if last.stage is Stage.RUNNING)
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
        self._stop_leading(seq)
        self._drop_source(seq)
        last = seq.content(seq.n_indexed, self.limits.page_tokens, min(seq.n_finite, self._n_public(seq)))
        if self.pool.index.is_worth_adding(last):  # because the chat's next turn continues after it
            self._publish(seq, last.key, last)
        self.pool.release(seq.pages.array.tolist())
        seq.pages.clear()
        if self.groups:
            self.groups.release(seq.caches)
            seq.caches = NO_CACHES
        seq.n_indexed = seq.n_computed = seq.n_finite = 0

    # ------------------------------------------------------------------ prefixes that are known

    def publish_verified(self, seq: Sequence, n: int | None = None) -> None:
        """Publish the full pages of a sequence after a finite token was drawn from them.

        n: how many of its tokens are verified, if later ones are in flight; None: all computed ones
        """
        page_tokens = self.limits.page_tokens
        seq.n_finite = seq.n_computed if n is None else n
        next_full = (seq.n_indexed + 1) * page_tokens
        if self.groups:
            self.groups.publish_released(seq.caches)
        nothing_new = seq.n_finite < next_full or self._n_public(seq) < next_full  # the case for most tokens
        if nothing_new and seq.leader_prefix_key is None and not seq.request.has_retention:
            return
        n_full = min(seq.n_finite, self._n_public(seq)) // page_tokens
        for i, key in enumerate(seq.page_keys(n_full, page_tokens)[seq.n_indexed :], seq.n_indexed):
            self._publish(seq, key, seq.content(i, page_tokens))
        self._stop_leading(seq)
        if seq.request.has_retention:
            self.retention.keep(seq)

    def _publish(self, seq: Sequence, key: Key, content: PageKey) -> None:
        """Publish the first page of the sequence that is not in the index yet."""
        i, pages = seq.n_indexed, seq.pages.array
        self.groups.publish(seq.caches, i, key)
        pages[i] = self.pool.publish(int(pages[i]), key, int(pages[i - 1]) if i else None, content)
        seq.n_indexed += 1

    def _n_public(self, seq: Sequence) -> int:
        """Number of tokens that others may reuse: all, or without the prefix cache its prompt, for its siblings."""
        own = seq.n_prompt if len(seq.request.choices) > 1 else 0
        return seq.n_tokens if self.prefix_cache else own

    def _known_prefix(self, seq: Sequence) -> Pages | None:
        """Return the computed pages that `seq` may share; None if waiting for more of them is faster."""
        if seq.prefix_leader is not None and seq.prefix_leader.leader_prefix_key is not None:
            return None
        seq.prefix_leader, request, page_tokens = None, seq.request, self.limits.page_tokens
        if seq.index and request.n_scored < seq.n_prompt:
            return None
        keys = self._findable(seq)
        result = self._find(keys)
        if len(result) < len(keys):
            # With states, a prefix is known only where a state was saved: waiting may be useless.
            prefix_leader = self._leading.get(keys[len(result)]) if self.groups.slots is None else None
            if prefix_leader is not None and seq.is_faster_after_leader(
                prefix_leader, len(keys), len(result), page_tokens
            ):
                seq.prefix_leader = prefix_leader
                return None
        return result

    def _find(self, keys: list[Key]) -> Pages:
        """Return the longest known prefix from which the sequence can continue in every cache group."""
        result = self.pool.index.find(keys)
        return result[: self.groups.n_known(keys[: len(result)])] if self.groups else result

    def _findable(self, seq: Sequence) -> list[Key]:
        """Return the keys to look up: without the last token, from which the next is drawn, and tokens to be scored."""
        scored = seq.n_tokens if seq.index or seq.request.n_scored == seq.n_prompt else seq.request.n_scored
        return seq.page_keys(min(scored - 1, self._n_public(seq)) // self.limits.page_tokens, self.limits.page_tokens)

    def _lead(self, seq: Sequence) -> None:
        """Let others with the same prefix wait for what this sequence computes after its known pages."""
        if seq.index == 0 and seq.request.n_scored < seq.n_prompt:
            return  # scoring a prompt takes many steps: too long to wait for
        n_full = min(seq.n_tokens, self._n_public(seq)) // self.limits.page_tokens
        if n_full > seq.n_indexed:
            key = seq.page_keys(n_full, self.limits.page_tokens)[seq.n_indexed]
            seq.leader_prefix_key = key if self._leading.setdefault(key, seq) is seq else None

    def _stop_leading(self, seq: Sequence) -> None:
        if seq.leader_prefix_key is not None:
            del self._leading[seq.leader_prefix_key]
            seq.leader_prefix_key = None
