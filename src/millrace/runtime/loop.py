"""The engine loop: drain commands -> schedule -> run -> emit. Results are emitted while the next step runs.

One thread calls `step` repeatedly; it owns the scheduler, the pages and the answers. Other threads use `submit`,
`cancel` and `stats`. The executor and the clock are arguments, so that tests and the sizing simulator run this very
code.

If the executor holds two steps in flight (a GPU's does), a step is launched before the tokens of the previous one are
known: they stay on the device, which inserts them into the next step. The loop then learns one step late that an answer
has ended. It drops what was computed for that answer since; the keys written meanwhile are never read.
"""

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from contextlib import ExitStack
from functools import partial

from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.engine.executor import Executor, ExecutorLimits, StepOutputs
from millrace.errors import MillraceError, RequestError
from millrace.runtime.adapters import check_adapter
from millrace.runtime.engine_thread import EngineThread
from millrace.runtime.kv.kv_offload import KvOffloadStore
from millrace.runtime.kv.pages import PagePool
from millrace.runtime.loop_stats import Counters, LoopStats
from millrace.runtime.request.prompt_embeds import Prompt, parse_prompt
from millrace.runtime.request.request import (
    DEFAULT_OPTIONS,
    AnswerText,
    Deliver,
    Request,
    RequestOptions,
    Sequence,
    Stage,
    StopTables,
    Timings,
)
from millrace.runtime.request.resume import resume
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams, TokenLogprobs, resolve
from millrace.runtime.scheduling.admission_policy import Policy, fcfs
from millrace.runtime.scheduling.scheduler import Scheduler
from millrace.runtime.scheduling.step import BatchBuilder, InFlightStep, Step, check
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.runtime.step_history import History, RequestRecord, RequestTrace, StepRecord, traces
from millrace.runtime.structured_output.grammar import GrammarCompiler, Matcher

log = logging.getLogger(__name__)


def _nothing(*_: object) -> None:
    """Do nothing; the default of optional callbacks."""


class EngineLoop:
    """Runs an executor for many requests. `start` gives it a thread; without one, its owner calls `step`.

    defaults: the model's sampling defaults and its end-of-text tokens
    budget: limits the duration of a step while answers are running
    prefix_cache: whether a prompt reuses the pages of an earlier prompt with the same beginning
    policy: the order in which waiting sequences are admitted
    tier: receives the pages that the pool evicts
    """

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, defaults: GenerationDefaults | None = None,
        clock: Callable[[], float] = time.perf_counter, budget: TokenBudget | None = None, prefix_cache: bool = True,
        policy: Policy = fcfs, tier: KvOffloadStore | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.thread = tokenizer, EngineThread(clock)
        self.limits: ExecutorLimits = executor.limits
        self.defaults = defaults or GenerationDefaults()
        self.grammars = GrammarCompiler(tokenizer, self.limits.vocab_size, self.defaults.eos_token_ids)
        self._pool = PagePool(self.limits.n_pages, tier)
        self._scheduler = Scheduler(self.limits, self._pool, clock, budget, prefix_cache, policy)
        self._executor = executor
        self._batches = deque(BatchBuilder(self.limits, self.grammars) for _ in range(executor.depth))
        self._in_flight: deque[InFlightStep] = deque()  # launched, and not waited for yet
        self._last_end_s = -math.inf  # when the last step ended
        self.budget = self._scheduler.budget
        self._live: dict[Request, None] = {}
        self._pending: dict[Request, list[Delta]] = {}  # deltas of the current step
        self._retries: list[Step] = []  # a failed step, split by request; the last is run first
        self._counters, self.history = Counters(), History(live=lambda: tuple(self._live))
        self._after_step: Callable[[], None] = _nothing
        self._on_computing: Callable[[bool], None] = _nothing
        self._stepping = threading.Lock()  # several threads may wait for a loop that has no thread of its own
        self._submitted: list[Request] = []  # this and the next two are guarded by thread.changed
        self._cancelled: list[Request] = []
        self._n_submitted = 0  # sequences that the scheduler does not hold yet

    # ------------------------------------------------------------------ for any thread

    def submit(
        self, prompt: Prompt, params: SamplingParams, deliver: Deliver, request_id: str | None = None,
        stops: StopTables | None = None, first: int = 0,
        options: RequestOptions = DEFAULT_OPTIONS, matchers: Ordered[Matcher] = (),
    ) -> Request:  # fmt: skip
        """Prepare and queue a request. raises RequestError, BusyError"""
        request = self.prepare(prompt, params, deliver, request_id, stops, first, options, matchers)
        self.queue(request)
        return request

    def prepare(
        self, prompt: Prompt, params: SamplingParams, deliver: Deliver, request_id: str | None = None,
        stops: StopTables | None = None, first: int = 0,
        options: RequestOptions = DEFAULT_OPTIONS, matchers: Ordered[Matcher] = (),
    ) -> Request:  # fmt: skip
        """Make a request.

        Its deltas are passed to `deliver` in the engine thread, at most once per step; the last delta of each choice
        has a finish_reason.
        prompt: token ids, or embedding rows (N, width)
        stops: the tables of `params.stop`, if the caller has made them; first: the index of its first choice
        matchers: one for each choice, made by `grammars` from `params.structured_outputs`
        raises RequestError
        """
        assert len(matchers) == (params.n if params.structured_outputs else 0), (
            "matchers must be compiled before submit"
        )
        tokens, embedded = parse_prompt(prompt, params, self.limits)
        check_adapter(options.adapter, self.limits)
        resolved = resolve(params, self.defaults, self.limits, len(tokens))
        prompt_ids, tables = tokens.tolist() if embedded is None else None, stops or StopTables(params.stop)
        new_text = partial(AnswerText.for_choice, self.tokenizer, prompt_ids, params, tables)
        own_id, timings = request_id or uuid.uuid4().hex, Timings(queued_s=self.thread.clock())
        request = Request(own_id, tokens, resolved, deliver, timings, new_text, first, options, matchers, embedded)
        resume(request, self.limits.vocab_size, self.grammars)
        return request

    def queue(self, request: Request) -> None:
        """Pass a prepared request to the engine thread. raises BusyError if the loop has stopped"""
        with self.thread.changed:
            self.thread.check_open()
            if request.has_retention:
                self._scheduler.retention.promise(request)
            if self._is_idle():
                self.thread.record_progress()
            self._submitted.append(request)
            self._n_submitted += len(request.choices)
            self.thread.changed.notify()

    def cancel(self, request: Request) -> None:
        """Finish the request with ABORT before the next step. Does nothing if it is finished."""
        with self.thread.changed:
            self._cancelled.append(request)
            self.thread.changed.notify()

    def stats(self) -> LoopStats:
        """A snapshot, cheap enough for every request."""
        counters, scheduler, index, now_s = self._counters, self._scheduler, self._pool.index, self.thread.clock()
        with self.thread.changed:
            n_waiting, idle = self._n_submitted + len(scheduler.waiting), self._is_idle()
        return LoopStats(
            running=len(scheduler.running), waiting=n_waiting, idle=idle, healthy=not self.thread.dead_because,
            pages_used=self._pool.n_used, pages_kept=index.n_free, pages_total=self._pool.n_pages,
            pages_pinned=len(scheduler.retention.pins.pinned), pages_evicted_total=index.n_evicted,
            windows=scheduler.groups.stats(), tier=None if self._pool.tier is None else self._pool.tier.stats,
            prompt_tokens_total=counters.prompt_tokens, generation_tokens_total=counters.generation_tokens,
            prefix_queries_total=scheduler.n_queried, prefix_hits_total=scheduler.n_hit,
            preemptions_total=scheduler.n_preemptions, finished_total=dict(counters.finished),
            steps_total=counters.steps, step_tokens_total=counters.step_tokens,
            last_step_s=self.thread.seconds_since_progress,
            running_s=sum(seq.request.timings.running_s(now_s) for seq in tuple(scheduler.running)),
            held_s_total=counters.running_s, left_total=counters.left,
        )  # fmt: skip

    def traces(self, request_id: str) -> list[RequestTrace]:
        """Return the traces of all requests with this id; none if it is unknown or no longer in the history."""
        return traces(request_id, self.history, tuple(self._live))

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Return False, and do nothing, while sequences hold pages."""
        with self._stepping:
            return self._pool.clear_index() and self._scheduler.groups.clear()

    def start(self, after_step: Callable[[], None] = _nothing, computing: Callable[[bool], None] = _nothing) -> None:
        """Run in a new thread, which calls `after_step` after each step's deliveries, `computing` around each step."""
        self._after_step, self._on_computing = after_step, computing
        self.thread.start(self._run)

    def stop(self) -> None:
        """End the thread after the step in progress; unfinished requests end with ABORT.

        Submits are refused meanwhile. Afterwards the loop is idle, and may be started or stepped again.
        """
        if not self.thread.stop():
            with self._stepping:
                self._abort_all(FinishReason.ABORT, "the server is stopping")
        self._after_step, self._on_computing, self.thread.stopping = _nothing, _nothing, False

    # ------------------------------------------------------------------ for the engine thread

    def step(self, defer_delivery: bool = False) -> bool:
        """Drain commands, run one step, deliver. Return False if there was nothing to run.

        defer_delivery: the caller runs another step at once, and this step is delivered while that one runs
        """
        with self._stepping:
            self._drain_commands()
            self._scheduler.expire()
            for request in self._scheduler.overdue():
                self._end(
                    request, FinishReason.ABORT, f"it waited longer than {request.queue_options.queue_timeout_s:g} s"
                )
            ran = self._scheduler.has_work or bool(self._in_flight)
            if ran:
                self._run_step()
            if not (defer_delivery and ran and self._scheduler.has_work):
                self._deliver()
            self.thread.record_progress()
        return ran

    def _run(self) -> None:
        thread, reason = self.thread, "a defect in the engine loop"  # of the end, unless it is orderly
        try:
            while not thread.stopping and not thread.dead_because:
                if not self.step(defer_delivery=True):
                    with thread.changed:
                        while not (self._submitted or self._cancelled or thread.stopping):
                            if not thread.changed.wait(self._scheduler.next_expiry_s):
                                break
            reason = ""
        finally:  # in any case, no client waits forever
            if reason:
                thread.dead_because = reason
                self._fail_all_after_crash(f"the engine has stopped: {reason}")
            elif not thread.dead_because:
                self._abort_all(FinishReason.ABORT, "the server is stopping")

    def _drain_commands(self) -> None:
        with self.thread.changed:  # held throughout, so that `stats` counts each sequence exactly once
            cancelled, self._cancelled = self._cancelled, []
            for request in self._submitted:
                self._live[request] = None
                self._scheduler.add(request)
            self._submitted, self._n_submitted = [], 0
        for request in cancelled:
            self._end(request, FinishReason.ABORT, None)

    def _run_step(self) -> None:
        """Launch a step and wait for the oldest one: the same step, unless two are in flight."""
        previous = self._in_flight[-1] if self._in_flight else None
        # A sequence in an unfinished step must not be preempted; and a step whose wait() was interrupted by a callback
        # must be settled first.
        if previous is not None and (
            self._scheduler.must_preempt or not previous.can_run_ahead or len(self._in_flight) > 1
        ):
            self._wait_and_distribute()
            return
        if self._pool.tier is not None and self._scheduler.waiting:
            self._deliver()  # admitting a sequence may wait for the disk, and delays only itself
        alone = bool(self._retries)
        step, fault = self._next_step(), None
        if step.chunks:
            try:
                self._in_flight.append(self._launch(step, previous, waits=alone))
            except (RuntimeError, MillraceError) as error:
                fault = error
        self._deliver()  # of the previous step; the readers that it wakes run while the executor leaves cores free
        if previous is not None and not self._wait_and_distribute():
            return
        if fault is not None:
            self._step_failed(step, fault)
        elif self._in_flight and not self._in_flight[-1].can_run_ahead:
            self._wait_and_distribute()

    def _launch(self, step: Step, previous: InFlightStep | None, waits: bool) -> InFlightStep:
        """Start a step. waits: it must finish before the next one is launched. raises what executors raise"""
        self._batches.rotate()  # the inputs in the other buffers are still being read
        inputs = self._batches[0].build(step, previous.step if previous else None)
        self._on_computing(True)
        started_s, overlaps = self.thread.clock(), not waits and self._executor.depth > 1
        can_run_ahead = (
            overlaps and step.can_run_ahead and not self._scheduler.groups
        )  # what cache groups have released cannot be restored
        try:
            self._executor.launch(inputs)
        except (RuntimeError, MillraceError):
            self._on_computing(previous is not None)
            raise
        if can_run_ahead:
            self._scheduler.run_ahead(step)
        return InFlightStep(step, started_s, can_run_ahead)

    def _wait_and_distribute(self) -> bool:
        """Wait for the oldest step and distribute its tokens. Return False if it failed: no step is in flight then."""
        flight = self._in_flight.popleft()
        step = flight.step
        try:
            outputs = self._executor.wait()
        except (RuntimeError, MillraceError) as error:  # raised by executors; a failed assert ends the loop
            if self._in_flight:
                self._discard_flight(self._in_flight.popleft())
            if flight.can_run_ahead:
                self._scheduler.roll_back(step)
            self._step_failed(step, error)
            return False
        finally:
            self._on_computing(bool(self._in_flight))
        self.thread.step_done()
        now_s = self.thread.clock()
        began_s, self._last_end_s = max(flight.started_s, self._last_end_s), now_s
        if not flight.can_run_ahead:
            self._scheduler.advance(step)
        self.budget.observe(step.n_prefill, now_s - began_s, step.n_tokens - step.n_prefill)
        self._counters.steps += 1
        self._counters.step_tokens += step.n_tokens
        n, n_waiting = self._counters.steps, len(self._scheduler.waiting)
        self.history.steps.append(StepRecord(n, began_s, now_s - began_s, n_waiting, *step.to_history()))
        self._distribute(flight, outputs, now_s)
        return True

    def _discard_flight(self, flight: InFlightStep) -> None:
        """Wait for a step that depends on a failed one, and drop its outputs."""
        try:
            self._executor.wait()
        except (RuntimeError, MillraceError) as error:
            log.warning("a step behind one that failed", exc_info=error)
        if flight.can_run_ahead:
            self._scheduler.roll_back(flight.step)

    def _distribute(self, flight: InFlightStep, outputs: StepOutputs, now_s: float) -> None:
        """Pass each scored and each drawn token to its choice."""
        tokens: list[int] = outputs.tokens.tolist()
        failed = min(tokens, default=0) < 0
        for chunk, first, row in flight.step.rows():
            seq = chunk.sequence
            if first == row or seq.stage is Stage.GONE:  # a sibling failed just now, or the answer had ended
                continue
            if failed and min(tokens[first:row]) < 0:
                self._end(seq.request, FinishReason.ERROR, *seq.sampling_failure(min(tokens[first:row])))
                continue
            resolved = seq.request.resolved
            if chunk.n_scored and (n_top := resolved.prompt_top) is not None:
                rows = range(first, first + chunk.n_scored)
                scored = tuple(TokenLogprobs.from_row(outputs, r, n_top) for r in rows)
                for choice in seq.request.choices:  # the others wait for it: each reports the prompt before its answer
                    self._add(choice, choice.scored(scored))
            if chunk.draws:
                seq.n_ahead -= flight.can_run_ahead
                self._scheduler.publish_verified(seq, chunk.start + chunk.n)
                logprobs = None if resolved.n_top is None else TokenLogprobs.from_row(outputs, row - 1, resolved.n_top)
                self._count(seq, now_s)
                self._add(seq, seq.append_token(tokens[row - 1], logprobs))

    def _count(self, seq: Sequence, now_s: float) -> None:
        """Update timings and counters for a drawn token."""
        timings = seq.request.timings
        if timings.first_token_s is None:
            timings.first_token_s = now_s
            self._counters.prompt_tokens += seq.n_prompt
        timings.last_token_s = now_s
        timings.n_output_tokens += 1
        self._counters.generation_tokens += 1

    def _next_step(self) -> Step:
        while self._retries:
            if (step := self._retries.pop().without_ended()).chunks:
                return step
        return self._scheduler.schedule()

    def _step_failed(self, step: Step, error: Exception) -> None:
        """Retry each request of a failed step alone, to find the one that fails. The pages are as before the step."""
        if len(alone := step.by_request()) > 1:
            log.warning("a step of %d requests failed; each is computed alone", len(alone), exc_info=error)
            self._retries = alone[::-1]
            return
        for request in dict.fromkeys(chunk.sequence.request for chunk in step.chunks):
            self._end(request, FinishReason.ERROR, f"the step that computed this request failed: {error}")
        check_alone = partial(check, self._executor, self._pool, self._scheduler.groups)
        self.thread.step_failed(f"a step of {step.n_tokens} tokens", error, check_alone)
        if cause := self.thread.dead_because:
            self._abort_all(FinishReason.ERROR, f"the engine has stopped: {cause}")

    def _add(self, seq: Sequence, delta: Delta) -> None:
        request, reason = seq.request, delta.finish_reason
        self._pending.setdefault(request, []).append(delta)
        if reason is None:
            return
        if seq.stage is Stage.RUNNING:
            self._counters.left += 1
            self._counters.running_s += request.timings.running_s(self.thread.clock())
        self._scheduler.remove(seq)
        self._counters.finished[reason] += 1
        if not request.is_open:
            del self._live[request]
            order, n, timings, queueing = request.order, len(request.prompt), request.timings, request.queue_options
            timings.finished_s = self.thread.clock()
            self.history.ended.append(RequestRecord(order, request.id, n, request.n_cached, timings, queueing.tenant))

    def _end(
        self, request: Request, reason: FinishReason, error: str | None, fault: RequestError | None = None
    ) -> None:
        """End every choice that is still open. Does nothing for a finished request."""
        for seq in request.choices if request in self._live else ():
            if seq.stage is not Stage.GONE:
                self._add(seq, seq.end(reason, error, fault))

    def _abort_all(self, reason: FinishReason, error: str) -> None:
        while self._in_flight:
            self._wait_and_distribute()
        self._drain_commands()
        for request in list(self._live):
            self._end(request, reason, error)
        self._deliver()

    def _fail_all_after_crash(self, error: str) -> None:
        """Report the failure to every request, without using the scheduler or the pages, whose state is unknown."""
        self._on_computing(False)  # a step may have been interrupted
        with self.thread.changed:
            submitted, self._submitted, self._n_submitted = self._submitted, [], 0
        with ExitStack() as deliveries:  # in reverse order; each runs even if the callback of another raises
            deliveries.callback(self._after_step)
            for request in reversed(dict.fromkeys([*self._pending, *self._live, *submitted])):
                deltas = self._pending.get(request, [])
                ended = {d.index for d in deltas if d.finish_reason is not None}
                open_ = {request.first + seq.index for seq in request.choices if seq.stage is not Stage.GONE} - ended
                failed = [Delta(i, "", (), finish_reason=FinishReason.ERROR, error=error) for i in sorted(open_)]
                deliveries.callback(request.deliver, deltas + failed)
            self._live, self._pending = {}, {}

    def _deliver(self) -> None:
        delivered = bool(self._pending)
        while self._pending:  # one by one: if a callback raises, the rest is reported when the loop ends
            request = next(iter(self._pending))
            deltas = self._pending.pop(request)
            request.deliver(deltas)
            if deltas[-1].finish_reason is not None and not request.is_open:
                request.break_cycles()
        if delivered or self.thread.dead_because:  # even if no reader is left
            self._after_step()

    def _is_idle(self) -> bool:
        return self._n_submitted == 0 and not self._scheduler.has_work
