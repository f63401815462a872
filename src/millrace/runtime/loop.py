"""The engine loop: drain commands -> schedule -> run -> emit.

One thread runs `step` again and again; it owns scheduler, pages and answers. Others reach it through `submit`, `cancel`
and `stats`. The executor and the clock are arguments, so that tests and the sizing simulator run this very code.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

from millrace.checkpoint.generation import GenerationDefaults
from millrace.checkpoint.tokenizer import Detokenizer, Tokenizer
from millrace.engine.executor import Executor, ExecutorLimits, IntArray, StepOutputs
from millrace.errors import BusyError, MillraceError
from millrace.runtime.batch import BatchBuilder, token_logprobs
from millrace.runtime.pages import PagePool
from millrace.runtime.params import Delta, FinishReason, SamplingParams, check_prompt, resolve
from millrace.runtime.request import AnswerText, Deliver, Request, Sequence, Stage, StopTables, Timings
from millrace.runtime.scheduler import Scheduler, Step, TokenBudget

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


MAX_FAILURES_IN_A_ROW = 3
NOT_FINITE = "the model's output for this request was not finite"

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs an executor for many requests. `start` gives it a thread; without one, its owner calls `step`.

    `defaults` is the model's generation_config; `budget` limits how long a step may last while answers are running.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults | None = None,
        clock: Callable[[], float] = time.perf_counter,
        budget: TokenBudget | None = None,
    ) -> None:
        self.tokenizer, self.clock = tokenizer, clock
        self.limits: ExecutorLimits = executor.limits
        self.defaults = _with_eos(defaults or GenerationDefaults(), tokenizer)
        self._executor = executor
        self._pool = PagePool(self.limits.n_pages)
        self._scheduler = Scheduler(self.limits, self._pool, clock, budget)
        self._batch = BatchBuilder(self.limits)
        self._live: dict[Request, None] = {}
        self._pending: dict[Request, list[Delta]] = {}  # what this step adds
        self._counters = Counters()
        self._n_failed_in_row = 0
        self._dead_because: str | None = None
        self._progress_s = clock()
        self._thread: threading.Thread | None = None
        self._after_step: Callable[[], None] = _nothing
        self._stepping = threading.Lock()  # several threads may wait for answers of a loop that has none of its own
        self._commands_changed = threading.Condition()  # guards the four below
        self._submitted: list[Request] = []
        self._cancelled: list[Request] = []
        self._n_submitted = 0  # sequences on their way to the scheduler
        self._stopping = False

    # ------------------------------------------------------------------ for any thread

    @property
    def running_in_thread(self) -> bool:
        return self._thread is not None

    @property
    def in_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def submit(
        self,
        prompt_token_ids: Ordered[int] | IntArray,
        params: SamplingParams,
        deliver: Deliver,
        request_id: str | None = None,
        stops: StopTables | None = None,
        first: int = 0,
    ) -> Request:
        """Queue a request; its deltas go to `deliver`, in the engine thread, at most once a step.

        Every choice ends with exactly one delta that has a finish_reason.
        stops: the tables of `params.stop`, where they were made elsewhere; first: the index of its first choice
        raises RequestError on bad input, BusyError when the loop has stopped.
        """
        prompt = check_prompt(prompt_token_ids, self.limits)
        resolved = resolve(params, self.defaults, self.limits, len(prompt))
        prompt_ids, tables = prompt.tolist(), stops or StopTables(params.stop)

        def new_text() -> AnswerText:
            shown = Detokenizer(self.tokenizer, params.skip_special_tokens, prompt_ids)
            return AnswerText(shown, tables, params.include_stop_str_in_output)

        timings = Timings(queued_s=self.clock())
        request = Request(request_id or uuid.uuid4().hex, prompt, resolved, deliver, timings, new_text, first)
        with self._commands_changed:
            if self._dead_because is not None or self._stopping:
                why = self._dead_because or "it is being closed"
                raise BusyError(f"the engine has stopped: {why}", "a running engine", "restart it; its log says more")
            if self._is_idle():
                self._progress_s = self.clock()  # waiting for work was no lack of progress
            self._submitted.append(request)
            self._n_submitted += len(request.choices)
            self._commands_changed.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Finish the request with ABORT before the next step. Harmless when it is finished."""
        with self._commands_changed:
            self._cancelled.append(request)
            self._commands_changed.notify()

    def stats(self) -> LoopStats:
        """A snapshot, cheap enough for every request."""
        counters, scheduler = self._counters, self._scheduler
        with self._commands_changed:
            n_waiting, idle = self._n_submitted + len(scheduler.waiting), self._is_idle()
        return LoopStats(
            running=len(scheduler.running),
            waiting=n_waiting,
            pages_used=self._pool.n_used,
            pages_total=self._pool.n_pages,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            preemptions_total=scheduler.n_preemptions,
            steps_total=counters.steps,
            step_tokens_total=counters.step_tokens,
            finished_total=dict(counters.finished),
            last_step_s=self.clock() - self._progress_s,
            idle=idle,
            healthy=self._dead_because is None,
            request_time_s=counters.request_time_s,
        )

    def start(self, after_step: Callable[[], None] | None = None) -> None:
        """Run in a thread of its own; `after_step` is called there after each step's deliveries."""
        assert self._thread is None, "the loop is already running"
        self._after_step = after_step or _nothing
        self._thread = threading.Thread(target=self._run, name="millrace-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in progress; what is unfinished ends with ABORT.

        Submits are refused meanwhile. Then the loop is at rest: it may be started, or stepped, again.
        """
        with self._commands_changed:
            self._stopping = True
            self._commands_changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            with self._stepping:
                self._end_everything(FinishReason.ABORT, "the server is stopping")
        self._after_step, self._stopping = _nothing, False

    # ------------------------------------------------------------------ for the engine thread

    def step(self) -> bool:
        """Drain commands, run one step, deliver. False when there was nothing to run."""
        with self._stepping:
            self._drain_commands()
            ran = self._scheduler.has_work
            if ran:
                self._run_step()
            self._deliver()
            self._progress_s = self.clock()
        return ran

    def _run(self) -> None:
        why = "a defect in the engine loop"  # unless it ends in an orderly way
        try:
            while not self._stopping and self._dead_because is None:
                if not self.step():
                    with self._commands_changed:
                        while not (self._submitted or self._cancelled or self._stopping):
                            self._commands_changed.wait()
            why = ""
        finally:  # whatever happened, nobody waits for ever
            if why:
                self._dead_because = why
                self._abandon_everything(f"the engine has stopped: {why}")
            elif self._dead_because is None:
                self._end_everything(FinishReason.ABORT, "the server is stopping")

    def _drain_commands(self) -> None:
        with self._commands_changed:  # so that no sequence is counted twice or not at all meanwhile
            cancelled, self._cancelled = self._cancelled, []
            for request in self._submitted:
                self._live[request] = None
                self._scheduler.add(request)
            self._submitted, self._n_submitted = [], 0
        for request in cancelled:
            self._end(request, FinishReason.ABORT, None)

    def _run_step(self) -> None:
        step = self._scheduler.schedule()
        inputs = self._batch.build(step)
        started_s = self.clock()
        try:
            self._executor.launch(inputs)
            outputs = self._executor.wait()
        except (RuntimeError, MillraceError) as error:  # what executors raise; a failed assert is our own and ends us
            self._step_failed(step, error)
            return
        self._n_failed_in_row = 0
        now_s = self.clock()
        self._scheduler.commit(step, now_s - started_s)
        self._counters.steps += 1
        self._counters.step_tokens += step.n_tokens
        self._distribute(step, outputs, now_s)

    def _distribute(self, step: Step, outputs: StepOutputs, now_s: float) -> None:
        """Give each scored and each drawn token to its choice."""
        tokens: list[int] = outputs.tokens.tolist()
        row = 0
        for chunk in step.chunks:
            seq, first = chunk.sequence, row
            row += chunk.n_rows
            if first == row or seq.stage is Stage.GONE:  # its sibling failed a moment ago
                continue
            if min(tokens[first:row]) < 0:
                self._end(seq.request, FinishReason.ERROR, NOT_FINITE)
                continue
            resolved = seq.request.resolved
            if chunk.n_scored and (n_top := resolved.prompt_top) is not None:
                rows = range(first, first + chunk.n_scored)
                scored = tuple(token_logprobs(outputs, r, n_top) for r in rows)
                for choice in seq.request.choices:  # the others wait for it: each tells of the prompt before its answer
                    self._add(choice, choice.scored(scored))
            if chunk.draws:
                logprobs = None if resolved.n_top is None else token_logprobs(outputs, row - 1, resolved.n_top)
                self._count(seq, now_s)
                self._add(seq, seq.take(tokens[row - 1], logprobs))

    def _count(self, seq: Sequence, now_s: float) -> None:
        """A drawn token."""
        timings = seq.request.timings
        if timings.first_token_s is None:
            timings.first_token_s = now_s
            self._counters.prompt_tokens += seq.n_prompt
        timings.last_token_s = now_s
        timings.n_output_tokens += 1
        self._counters.generation_tokens += 1

    def _step_failed(self, step: Step, error: Exception) -> None:
        """Fail the requests that took part. The others' pages are untouched, so they go on."""
        self._n_failed_in_row += 1
        log.error("step of %d tokens failed, %d in a row", step.n_tokens, self._n_failed_in_row, exc_info=error)
        for request in dict.fromkeys(chunk.sequence.request for chunk in step.chunks):
            self._end(request, FinishReason.ERROR, f"the step that computed this request failed: {error}")
        if self._n_failed_in_row >= MAX_FAILURES_IN_A_ROW:
            self._dead_because = f"{MAX_FAILURES_IN_A_ROW} steps in a row failed, the last with: {error}"
            self._end_everything(FinishReason.ERROR, f"the engine has stopped: {self._dead_because}")

    # ------------------------------------------------------------------ finishing and delivering

    def _add(self, seq: Sequence, delta: Delta) -> None:
        request, reason = seq.request, delta.finish_reason
        self._pending.setdefault(request, []).append(delta)
        if reason is None:
            return
        self._scheduler.remove(seq)
        self._counters.finished[reason] += 1
        if not request.is_open:
            del self._live[request]
            timings = request.timings
            timings.finished_s = self.clock()
            if timings.first_scheduled_s is not None:
                self._counters.request_took(timings.finished_s - timings.first_scheduled_s)

    def _end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """End every choice that is still open; harmless for a request that is finished."""
        if request in self._live:
            for seq in request.choices:
                if seq.stage is not Stage.GONE:
                    self._add(seq, seq.end(reason, error))

    def _end_everything(self, reason: FinishReason, error: str) -> None:
        self._drain_commands()
        for request in list(self._live):
            self._end(request, reason, error)
        self._deliver()

    def _abandon_everything(self, error: str) -> None:
        """Tell everyone, and rely on nothing else: scheduler and pages may be in any state."""
        with self._commands_changed:
            submitted, self._submitted, self._n_submitted = self._submitted, [], 0
        for request in dict.fromkeys([*self._pending, *self._live, *submitted]):
            deltas = self._pending.get(request, [])
            ended = {d.index for d in deltas if d.finish_reason is not None}
            still_open = (seq for seq in request.choices if seq.stage is not Stage.GONE)
            indices = {request.first + seq.index for seq in still_open} - ended
            failed = [Delta(i, "", (), finish_reason=FinishReason.ERROR, error=error) for i in sorted(indices)]
            request.deliver(deltas + failed)
        self._live, self._pending = {}, {}
        self._after_step()

    def _deliver(self) -> None:
        pending, self._pending = self._pending, {}
        for request, deltas in pending.items():
            request.deliver(deltas)
        if pending:
            self._after_step()

    def _is_idle(self) -> bool:
        return self._n_submitted == 0 and not self._scheduler.has_work


def _with_eos(defaults: GenerationDefaults, tokenizer: Tokenizer) -> GenerationDefaults:
    """The model's end-of-text tokens, or the tokenizer's where generation_config names none."""
    eos = tokenizer.eos_token_id
    if defaults.eos_token_ids or eos is None:
        return defaults
    return replace(defaults, eos_token_ids=(eos,))


def _nothing() -> None:
    """No one to tell after a step."""
