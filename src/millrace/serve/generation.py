"""The engine's side of one HTTP call: a request per prompt, read as one, measured, cancelled; and its stream of events.

A stream is one write for each step of the engine, whatever the number of its tokens and choices.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from millrace.errors import RequestError
from millrace.runtime.cache_options import PLAIN, CacheOptions
from millrace.runtime.params import Delta, FinishReason, SamplingParams, TokenLogprobs, with_length
from millrace.runtime.request import StopTables
from millrace.runtime.service import RequestHandle
from millrace.serve.errors import ABORTED, generation_failed
from millrace.serve.protocol import StreamOptions
from millrace.serve.replies import Asked, PromptTokensDetails, Usage
from millrace.serve.serving import LARGE, LARGE_STEP
from millrace.serve.text import TextBackend
from millrace.serve.wire import Call


@dataclass(slots=True)
class Whole:
    """One choice of an answer that is held until it is complete."""

    texts: list[str]
    last: Delta | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class GenerationFailedError(Exception):
    """The engine ended a choice with an error, or aborted it though its client is still there."""

    def __init__(self, delta: Delta) -> None:
        super().__init__(delta.error or ABORTED)
        aborted = delta.finish_reason is FinishReason.ABORT
        self.problem = generation_failed(delta.error, status=503 if aborted else 500)


class Generation:
    """`async with` it: whoever leaves early takes the requests along. Iteration gives lists of Delta until all ended.

    Choices are counted through all prompts: prompt 1 begins at n. Deltas of the same choice in one list are merged.
    raises GenerationFailedError from the iteration.
    """

    def __init__(self, handle: RequestHandle, params: SamplingParams, call: Call, backend: TextBackend) -> None:
        self.handle = handle
        self.params = params
        self._call, self._metrics = call, backend.metrics
        self._held = backend.unsent.share()
        self._n_generated = [0] * self.n_choices
        self._last_s: dict[int, float] = {}  # when each choice last got a token
        self._first_token_seen = False
        self._reasons: set[str] = set()

    @property
    def n_choices(self) -> int:
        return len(self.handle.requests) * self.params.n

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
        return usage_of(self.handle.n_prompt, self.n_generated, self.handle.n_cached)

    def usage_so_far(self, choice: int) -> Usage:
        """Of one choice alone, in the middle of a stream, as vLLM counts it."""
        request = self.handle.requests[choice // self.params.n]
        return usage_of(len(request.prompt), self._n_generated[choice], request.n_cached)

    @property
    def asked(self) -> Asked:
        seeds = [request.resolved.seed for request in self.handle.requests]
        return Asked(seeds[0], seeds) if len(seeds) > 1 else Asked(seeds[0])

    async def whole(self, named: Callable[[Delta], int], backend: TextBackend) -> list[Whole]:
        """All choices, complete; gathered in a thread where that would hold up the event loop.

        named: takes a delta's log probabilities, and says how many bytes more it holds, which count until this is left
        raises HttpError with 503 where all answers together are too many
        """
        choices = [Whole([]) for _ in range(self.n_choices)]

        def take(deltas: list[Delta]) -> int:
            n_bytes = 0
            for delta in deltas:
                choices[delta.index].texts.append(delta.text)
                choices[delta.index].last = delta
                n_bytes += named(delta)
            return n_bytes

        async for deltas in self:
            self._held.add(await backend.written(self.is_much(deltas), partial(take, deltas)))
        return choices

    def is_much(self, deltas: list[Delta]) -> bool:
        """Naming their tokens takes more than about a millisecond."""
        n_top = self.params.logprobs
        return n_top is not None and sum(delta.n_tokens for delta in deltas) * (1 + n_top) > LARGE_STEP

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._held.release()
        self.handle.cancel()
        self._note()

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        merged: dict[int, Delta] = {}
        for delta in await anext(self.handle):
            before = merged.get(delta.index)
            merged[delta.index] = delta if before is None else _joined(before, delta)
        deltas = list(merged.values())
        self._measure(deltas)
        for delta in deltas:
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._reasons.add(delta.finish_reason.value)
                raise GenerationFailedError(delta)
        return deltas

    def _measure(self, deltas: list[Delta]) -> None:
        now_s = time.perf_counter()
        for delta in deltas:
            n_tokens, choice = len(delta.token_ids), delta.index
            if not n_tokens:
                continue
            self._n_generated[choice] += n_tokens
            last_s = self._last_s.get(choice)
            if not self._first_token_seen:
                self._first_token_seen = True
                self._call.log.ttft_ms = (now_s - self._call.arrived_s) * 1e3
                self._metrics.ttft.observe(now_s - self._call.arrived_s)
            elif last_s is not None:
                for _ in range(n_tokens):
                    self._metrics.itl.observe((now_s - last_s) / n_tokens)
            self._last_s[choice] = now_s
            if delta.finish_reason is not None:
                self._reasons.add(delta.finish_reason.value)

    def _note(self) -> None:
        """Into the log line and, for those that came to a regular end, the histograms."""
        log, requests = self._call.log, self.handle.requests
        log.prompt_tokens, log.generated_tokens = self.usage.prompt_tokens, self.n_generated
        timings = requests[0].timings
        if timings.first_scheduled_s is not None:
            log.queue_ms = (timings.first_scheduled_s - timings.queued_s) * 1e3
        log.finish_reason = "+".join(sorted(self._reasons)) if self.handle.finished else FinishReason.ABORT.value
        if self.handle.finished and self._reasons <= {FinishReason.STOP.value, FinishReason.LENGTH.value}:
            self._metrics.e2e.observe(time.perf_counter() - self._call.arrived_s)
            n = self.params.n
            for i, request in enumerate(requests):
                longest = max(self._n_generated[i * n : (i + 1) * n])
                max_tokens = request.resolved.max_tokens
                self._metrics.finished(request.timings, len(request.prompt), n, max_tokens, longest)


async def start(
    backend: TextBackend,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    call: Call,
    *,
    continues: bool = False,
    whole_bytes: int | None = None,
    cache: CacheOptions = PLAIN,
) -> Generation:
    """Submit all prompts, or none.

    continues: they are texts, whose answers are short where no length is said
    cache: what each asks of the prefix cache
    whole_bytes: of each log probability in an answer that is held until it is complete; None: it is a stream
    raises RequestError, BusyError
    """
    engine, context = backend.model.engine, backend.model.max_context
    each = [with_length(params, len(prompt), context) if continues else params for prompt in prompts]
    if whole_bytes is not None and params.logprobs is not None:
        n_tokens = params.n * sum(
            (own.max_tokens or max(0, context - len(prompt))) + (len(prompt) if own.prompt_logprobs is not None else 0)
            for own, prompt in zip(each, prompts, strict=True)
        )
        check_whole(n_tokens, params.logprobs, whole_bytes, backend.settings.max_unread_bytes)
    stops = await backend.off_loop(sum(map(len, params.stop)) > LARGE, lambda: StopTables(params.stop))
    return Generation(engine.submit(prompts, each, call.id, stops, cache), params, call, backend)


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


def usage_of(n_prompt: int, n_generated: int, n_cached: int) -> Usage:
    """n_cached: tokens of the prompt that were found in the prefix cache"""
    return Usage(n_prompt, n_generated, n_prompt + n_generated, PromptTokensDetails(n_cached))


def _joined(a: Delta, b: Delta) -> Delta:
    """Two deltas of one choice, in order, as one."""
    return Delta(
        index=a.index,
        text=a.text + b.text,
        token_ids=a.token_ids + b.token_ids,
        logprobs=_both(a.logprobs, b.logprobs),
        finish_reason=b.finish_reason,
        stop_reason=b.stop_reason,
        error=b.error,
        prompt_logprobs=_both(a.prompt_logprobs, b.prompt_logprobs),
    )


def _both(a: tuple[TokenLogprobs, ...] | None, b: tuple[TokenLogprobs, ...] | None) -> tuple[TokenLogprobs, ...] | None:
    return None if a is None and b is None else (a or ()) + (b or ())


class StreamUsage:
    """What a stream says of its usage: nothing, or null until its last event, or the numbers so far in every event."""

    def __init__(self, asked: StreamOptions | None, generation: Generation) -> None:
        self.at_end = asked is not None and bool(asked.include_usage)
        self._always = self.at_end and asked is not None and bool(asked.continuous_usage_stats)
        self._generation = generation

    def of(self, choice: int) -> Usage | UnsetType | None:
        """For an event about that choice."""
        if not self.at_end:
            return UNSET
        return self._generation.usage_so_far(choice) if self._always else None


DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
_ENCODER = msgspec.json.Encoder()
log = logging.getLogger(__name__)


def events(replies: Iterable[msgspec.Struct]) -> bytes:
    """Each reply as one event."""
    return b"".join(b"data: " + _ENCODER.encode(reply) + b"\n\n" for reply in replies)


class EventStream:
    """A response that writes `blocks` as they come, and cancels `generation` when it ends early.

    A generation that fails after the status line was sent becomes an error event. A reader that takes nothing loses its
    connection (`connections.py`), and so the generation ends as for any client that goes away.
    """

    def __init__(self, generation: Generation, blocks: AsyncIterator[bytes]) -> None:
        self._generation, self._blocks = generation, blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with self._generation:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async for block in self._blocks:
                    if block:
                        await write(block)
            except GenerationFailedError as error:
                log.error("answer %s failed: %s", self._generation.handle.request_id, error)
                await write(b"data: " + error.problem.body() + b"\n\n")
        await write(DONE, more=False)
