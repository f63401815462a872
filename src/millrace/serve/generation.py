"""The engine's side of one HTTP call: one request per prompt, merged into one stream of steps, measured, cancelled."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from millrace.errors import MillraceError, RequestError
from millrace.runtime.params import Delta, FinishReason, SamplingParams
from millrace.runtime.resolve import no_tokens, with_length
from millrace.runtime.service import RequestHandle
from millrace.runtime.stops import StopTables
from millrace.serve.errors import context_exceeded, generation_failed
from millrace.serve.replies import Asked, Usage
from millrace.serve.sampling import with_own_seed
from millrace.serve.serving import LARGE, LARGE_STEP
from millrace.serve.text import TextBackend
from millrace.serve.wire import Call


@dataclass(frozen=True, slots=True)
class Step:
    """What one wake-up brought to one choice. `choice` counts through all prompts: prompt 1 begins at n."""

    choice: int
    delta: Delta


class GenerationFailedError(Exception):
    """The engine ended a choice with an error, or aborted it though its client is still there."""

    def __init__(self, delta: Delta) -> None:
        super().__init__(delta.error)
        aborted = delta.finish_reason is FinishReason.ABORT
        self.problem = generation_failed(delta.error, status=503 if aborted else 500)


class Generation:
    """`async with` it: whoever leaves early takes the requests along. Iteration gives lists of Step until all ended.

    Steps of the same choice in one list are merged. raises GenerationFailedError from the iteration.
    """

    def __init__(
        self, handles: Sequence[RequestHandle], params: SamplingParams, call: Call, serving: TextBackend
    ) -> None:
        self.handles = handles
        self.params = params
        self._call, self._metrics = call, serving.metrics
        self._held = serving.unsent.share()
        self._n_generated = [0] * (len(handles) * params.n)  # of each choice
        self._last_s: dict[int, float] = {}  # when each choice last got a token
        self._first_token_seen = False
        self._reasons: set[str] = set()
        self._queue: asyncio.Queue[list[Step] | None] = asyncio.Queue(maxsize=len(handles))
        self._pumps: list[asyncio.Task[None]] = []
        self._n_pumping = 0

    @property
    def n_generated(self) -> int:
        """Tokens so far, of all choices."""
        return sum(self._n_generated)

    @property
    def is_large(self) -> bool:
        """Writing down its log probabilities takes more than a few milliseconds."""
        n_top = self.params.logprobs
        return n_top is not None and self.n_generated * (1 + n_top) > LARGE

    @property
    def usage(self) -> Usage:
        return _usage(sum(handle.n_prompt for handle in self.handles), self.n_generated)

    def usage_so_far(self, choice: int) -> Usage:
        """Of one choice alone, in the middle of a stream, as vLLM counts it."""
        return _usage(self.handles[choice // self.params.n].n_prompt, self._n_generated[choice])

    @property
    def asked(self) -> Asked:
        seeds = [handle.seed for handle in self.handles]
        return Asked(seeds[0], seeds) if len(seeds) > 1 else Asked(seeds[0])

    async def taken(self, take: Callable[[list[Step]], int], serving: TextBackend) -> None:
        """All of it, given to `take` as it comes; in a thread where that would hold up the event loop.

        take: how many bytes more it holds, which count until the generation is left
        raises HttpError with 503 where all answers together are too many
        """
        async for steps in self:
            n_top = self.params.logprobs
            n_named = 0 if n_top is None else sum(len(step.delta.token_ids) for step in steps) * (1 + n_top)
            self._held.add(await serving.written(n_named > LARGE_STEP, partial(take, steps)))

    async def __aenter__(self) -> "Generation":
        if len(self.handles) > 1:
            self._pumps = [asyncio.create_task(self._pump(i)) for i in range(len(self.handles))]
            self._n_pumping = len(self._pumps)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._held.release()
        for handle in self.handles:
            handle.cancel()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        self._note()

    def __aiter__(self) -> AsyncIterator[list[Step]]:
        return self

    async def __anext__(self) -> list[Step]:
        steps = await (self._merged() if self._pumps else self._of(0))
        self._measure(steps)
        for step in steps:
            if step.delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._reasons.add(step.delta.finish_reason.value)
                raise GenerationFailedError(step.delta)
        return steps

    async def _of(self, prompt: int) -> list[Step]:
        first = prompt * self.params.n
        merged: dict[int, Delta] = {}
        for delta in await anext(self.handles[prompt]):
            before = merged.get(delta.index)
            merged[delta.index] = delta if before is None else _joined(before, delta)
        return [Step(first + index, delta) for index, delta in merged.items()]

    async def _merged(self) -> list[Step]:
        while self._n_pumping:
            steps = await self._queue.get()
            if steps is not None:
                return steps
            self._n_pumping -= 1
        raise StopAsyncIteration

    async def _pump(self, prompt: int) -> None:
        """The queue is bounded, so what a slow client does not fetch stays in the handle, which is bounded too."""
        try:
            while True:
                await self._queue.put(await self._of(prompt))
        except StopAsyncIteration:
            await self._queue.put(None)

    def _measure(self, steps: list[Step]) -> None:
        now_s = time.perf_counter()
        for step in steps:
            n_tokens = len(step.delta.token_ids)
            if not n_tokens:
                continue
            self._n_generated[step.choice] += n_tokens
            last_s = self._last_s.get(step.choice)
            if not self._first_token_seen:
                self._first_token_seen = True
                self._call.log.ttft_ms = (now_s - self._call.arrived_s) * 1e3
                self._metrics.ttft.observe(now_s - self._call.arrived_s)
            elif last_s is not None:
                for _ in range(n_tokens):
                    self._metrics.itl.observe((now_s - last_s) / n_tokens)
            self._last_s[step.choice] = now_s
            if step.delta.finish_reason is not None:
                self._reasons.add(step.delta.finish_reason.value)

    def _note(self) -> None:
        """Into the log line and, for those that came to a regular end, the histograms."""
        log, timings = self._call.log, self.handles[0].timings
        log.prompt_tokens, log.generated_tokens = self.usage.prompt_tokens, self.n_generated
        if timings.first_scheduled_s is not None:
            log.queue_ms = (timings.first_scheduled_s - timings.queued_s) * 1e3
        ended = all(handle.finished for handle in self.handles)
        log.finish_reason = "+".join(sorted(self._reasons)) if ended else FinishReason.ABORT.value
        if ended and self._reasons <= {FinishReason.STOP.value, FinishReason.LENGTH.value}:
            self._metrics.e2e.observe(time.perf_counter() - self._call.arrived_s)
            n = self.params.n
            for i, handle in enumerate(self.handles):
                longest = max(self._n_generated[i * n : (i + 1) * n])
                self._metrics.finished(handle.timings, handle.n_prompt, n, handle.max_tokens, longest)


async def start(
    serving: TextBackend,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    call: Call,
    *,
    continues: bool = False,
    whole_bytes: int | None = None,
) -> Generation:
    """Submit all prompts, or none.

    continues: they are texts, whose answers are short where no length is said
    whole_bytes: of each log probability in an answer that is held until it is complete; None: it is a stream
    raises RequestError, BusyError
    """
    engine, handles, context = serving.model.engine, list[RequestHandle](), serving.model.max_context
    each = [with_length(params, len(prompt), context) if continues else params for prompt in prompts]
    if whole_bytes is not None and params.logprobs is not None:
        n_tokens = params.n * sum(
            own.max_tokens or max(0, context - len(prompt)) for own, prompt in zip(each, prompts, strict=True)
        )
        check_whole(n_tokens, params.logprobs, whole_bytes, serving.settings.max_unread_bytes)
    stops = await serving.off_loop(sum(map(len, params.stop)) > LARGE, lambda: StopTables(params.stop))
    try:
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            handles.append(engine.submit(prompt, with_own_seed(own), f"{call.id}-{i}", stops))
    except MillraceError:
        for handle in handles:
            handle.cancel()
        raise
    return Generation(handles, params, call, serving)


def check_context(n_prompt: int, params: SamplingParams, max_context: int, param: str) -> None:
    """raises HttpError where they do not fit, RequestError where there is nothing to continue"""
    if not n_prompt:
        raise no_tokens(param)
    if n_prompt + (params.max_tokens or 1) > max_context:
        about = param if n_prompt >= max_context else "max_tokens"
        raise context_exceeded(max_context, str(n_prompt), params.max_tokens, about)


def check_whole(n_tokens: int, n_top: int, bytes_each: int, most_bytes: int) -> None:
    """Before an answer of so many tokens is computed that nobody could be sent. raises RequestError

    Of its log probabilities only: its text is a small part of them.
    """
    n_bytes = n_tokens * (1 + n_top) * bytes_each
    if n_bytes > most_bytes:
        raise RequestError(
            f"an answer of {n_tokens} tokens, with {1 + n_top} log probabilities for each, "
            f"is some {n_bytes // 2**20} MiB",
            f"at most {most_bytes // 2**20} MiB in one piece",
            "set stream to true, or lower n, max_tokens or the number of log probabilities",
            param="logprobs",
        )


def _usage(n_prompt: int, n_generated: int) -> Usage:
    return Usage(n_prompt, n_generated, n_prompt + n_generated)


def _joined(a: Delta, b: Delta) -> Delta:
    """Two deltas of one choice, in order, as one."""
    logprobs = None if a.logprobs is None and b.logprobs is None else (a.logprobs or ()) + (b.logprobs or ())
    return Delta(
        index=a.index,
        text=a.text + b.text,
        token_ids=a.token_ids + b.token_ids,
        logprobs=logprobs,
        finish_reason=b.finish_reason,
        stop_reason=b.stop_reason,
        error=b.error,
    )
