"""Token streams of one HTTP call: submits its prompts to the engine, merges their deltas, records metrics, cancels."""

import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from millrace import __version__
from millrace.checkpoint.tool_calls.answer_parser import ParsedDelta
from millrace.engine.executor import IntArray
from millrace.runtime.request.prompt_embeds import EmbeddedPrompt
from millrace.runtime.request.request import DEFAULT_OPTIONS, RequestOptions, StopTables
from millrace.runtime.request.sampling_params import (
    Delta,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    capped,
    check_context,
    with_length,
)
from millrace.runtime.service import RequestHandle
from millrace.serve.http.errors import GenerationFailedError
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_BODY, OFF_LOOP_ITEMS, OFF_LOOP_RESUME, OFF_LOOP_STEP
from millrace.serve.llm.conversation import Conversation
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.logprobs import check_reply_bytes
from millrace.serve.llm.output_parsing import PLAIN_TEXT, OutputReaderFactory
from millrace.serve.llm.reasoning import FIELDS
from millrace.serve.llm.response_types import (
    ChatFinish,
    CompletionTokensDetails,
    PromptTokensDetails,
    Receipt,
    SeedEcho,
    Usage,
)


class GenerationStream:
    """The merged deltas of a call's requests. Leaving the `async with` block early cancels the requests.

    Iteration yields lists of Delta until all choices have ended. Choices are numbered through all prompts: those of
    prompt 1 begin at n. Deltas of the same choice in one list are merged. Iterating raises GenerationFailedError.
    """

    def __init__(
        self,
        handle: RequestHandle,
        params: SamplingParams,
        call: RequestContext,
        backend: TextBackend,
        readers: OutputReaderFactory,
    ) -> None:
        """readers: creates the parser of each answer"""
        self.handle = handle
        self.params = params
        n = len(handle.requests) * params.n
        self._readers = None if readers.new_reader is None else [readers.new_reader() for _ in range(n)]
        self._metadata = backend.model.metadata
        self._digests: list[hashlib.blake2b] = []  # of each choice's tokens, for a receipt
        self.new_call_id = short_call_id if backend.speech_for(True).calls.short_ids else call_id
        self._call, self._metrics = call, backend.metrics
        self._unsent = backend.unsent.lease()
        self._n_generated = [0] * self.n_choices
        self._last_s: dict[int, float] = {}  # when each choice last got a token
        self._first_token_seen = False
        self._reasons: set[str] = set()
        for request in handle.requests:
            request.timings.received_s = call.arrived_s

    def keep_receipt(self) -> None:
        """Compute a receipt for `seed_echo`; to be called before the first token."""
        self._digests = [hashlib.blake2b(digest_size=16) for _ in range(self.n_choices)]

    @property
    def n_choices(self) -> int:
        return len(self.handle.requests) * self.params.n

    @property
    def n_generated(self) -> int:
        """Return the number of tokens of all choices so far."""
        return sum(self._n_generated)

    @property
    def has_many_logprobs(self) -> bool:
        """Return whether encoding the log probabilities takes more than a few milliseconds."""
        n_top = self.params.logprobs
        return n_top is not None and self.n_generated * (1 + n_top) > OFF_LOOP_ITEMS

    @property
    def usage(self) -> Usage:
        n_thought = sum(reader.n_thought for reader in self._readers or ())
        return usage_of(self.handle.n_prompt, self.n_generated, self.handle.n_cached, n_thought)

    def usage_so_far(self, choice: int) -> Usage:
        """Return the usage of one choice in the middle of a stream, as vLLM counts it."""
        request = self.handle.requests[choice // self.params.n]
        n_thought = self._readers[choice].n_thought if self._readers else 0
        return usage_of(len(request.prompt), self._n_generated[choice], request.n_cached, n_thought)

    @property
    def seed_echo(self) -> SeedEcho:
        seeds = [request.resolved.seed for request in self.handle.requests]
        if self._digests:
            (request,) = self.handle.requests
            engine, isa = (str(self._metadata.get(name, "")) for name in ("engine", "isa"))
            answers = [digest.hexdigest() for digest in self._digests]
            path, prompt = self._call.log.path, digest_of(request.prompt)
            return SeedEcho(seeds[0], receipt=Receipt(path, __version__, engine, isa, seeds[0], prompt, answers))
        return SeedEcho(seeds[0], seeds) if len(seeds) > 1 else SeedEcho(seeds[0])

    def parse_delta(self, delta: Delta) -> ParsedDelta:
        """Return what a delta adds to the parts of its answer; to be called once per delta, in order."""
        return ParsedDelta(delta.text) if self._readers is None else self._readers[delta.index].read(delta)

    def finish_of(self, delta: Delta) -> ChatFinish:
        """Return the finish reason of a choice's last delta; errors and aborts have been raised before."""
        assert delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), delta
        called = self._readers is not None and self._readers[delta.index].n_calls > 0
        return "length" if delta.finish_reason is FinishReason.LENGTH else "tool_calls" if called else "stop"

    def reserve_unsent_bytes(self, n_bytes: int) -> None:
        """Count bytes of log probabilities until the block ends. raises HttpError with 503 if all answers exceed it"""
        self._unsent.add(n_bytes)

    def is_expensive_to_encode(self, deltas: list[Delta]) -> bool:
        """Return whether naming the tokens of deltas takes more than about a millisecond."""
        n_top = self.params.logprobs
        return n_top is not None and sum(delta.n_tokens for delta in deltas) * (1 + n_top) > OFF_LOOP_STEP

    async def __aenter__(self) -> "GenerationStream":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._unsent.release()
        self.handle.cancel()
        self._record_metrics()

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        deltas = await anext(self.handle)
        if len(deltas) > 1:
            merged: dict[int, Delta] = {}
            for delta in deltas:
                before = merged.get(delta.index)
                merged[delta.index] = delta if before is None else _merge_deltas(before, delta)
            deltas = list(merged.values())
        self._measure(deltas)
        for delta in deltas:
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._reasons.add(delta.finish_reason.value)
                raise GenerationFailedError(delta, delta.fault)
        return deltas

    def _measure(self, deltas: list[Delta]) -> None:
        now_s = time.perf_counter()
        for delta in deltas:
            n_tokens, choice = len(delta.token_ids), delta.index
            if not n_tokens:
                continue
            self._n_generated[choice] += n_tokens
            if self._digests:
                self._digests[choice].update(np.array(delta.token_ids, "<i4").tobytes())
            last_s, timings = self._last_s.get(choice), self.handle.requests[choice // self.params.n].timings
            timings.first_read_s, timings.last_read_s = timings.first_read_s or now_s, now_s
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

    def _record_metrics(self) -> None:
        """Record the call in its log line and, if it ended regularly, in the histograms."""
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
                self._metrics.observe_finished(request.timings, len(request.prompt), n, max_tokens, longest)


def digest_of(ids: IntArray) -> str:
    """Return the digest of token ids, as receipts have it."""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).hexdigest()


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def short_call_id() -> str:
    return uuid.uuid4().hex[:9]


def ignore_thinking(backend: TextBackend, call: RequestContext, request: object) -> None:
    """List the fields about thoughts as ignored if the model has none."""
    if backend.texts.never_thinks and (ignored := [name for name in FIELDS if getattr(request, name) is not None]):
        call.ignored = tuple(sorted({*call.ignored, *ignored}))


async def start_chat_generation(
    backend: TextBackend, call: RequestContext, conversation: Conversation
) -> GenerationStream:
    """Submit a conversation; `GenerationStream.parse_delta` parses its answers. raises MillraceError"""
    tools, params = conversation.tools, conversation.params
    speech = backend.speech_for(tools is not None)
    specs = tools.specs if tools else ()
    ids = await backend.texts.encode_chat(
        conversation.messages, conversation.rendering, tools=specs, body_bytes=call.body_bytes
    )
    prompt = list(ids)
    answer_prefix = conversation.answer_prefix if conversation.rendering.continued else ""
    conversation.messages = ()  # they may be many times the body, and the answer may take minutes
    params = capped(params, len(prompt), backend.model.engine.limits.context_tokens) if conversation.capped else params
    check_context(len(prompt), params.max_tokens, backend.model.engine.limits.context_tokens, "messages")
    if tools is None and speech.thoughts is None:
        return await submit_prompts(
            backend, [prompt], params, call, conversation.options, whole_bytes=conversation.whole_bytes
        )
    is_large = tools is not None and call.body_bytes > OFF_LOOP_BODY  # their schemas become a grammar
    params = await backend.off_loop(is_large, partial(speech.params, params, tools))
    readers = speech.reader_factory(
        tools, speech.reasoning_state(prompt, answer_prefix), params.structured_outputs is not None
    )
    conversation.tools = None  # of them names are enough from here on
    return await submit_prompts(
        backend, [prompt], params, call, conversation.options, whole_bytes=conversation.whole_bytes, readers=readers
    )


async def submit_prompts(
    backend: TextBackend,
    prompts: Sequence[list[int] | EmbeddedPrompt],
    params: SamplingParams,
    call: RequestContext,
    options: RequestOptions = DEFAULT_OPTIONS,
    *,
    continues: bool = False,
    whole_bytes: int | None = None,
    readers: OutputReaderFactory = PLAIN_TEXT,
) -> GenerationStream:
    """Submit all prompts, or none.

    continues: the prompts are plain texts, whose answers are short if no length is set
    options: queue and cache options of each request
    whole_bytes: JSON bytes of each log probability in an answer that is not streamed; None: it is streamed
    readers: creates the parser of each answer
    raises RequestError, BusyError
    """
    engine, context = backend.model.engine, backend.model.engine.limits.context_tokens
    own_params = [with_length(params, len(prompt), context) if continues else params for prompt in prompts]
    if whole_bytes is not None and params.logprobs is not None:
        n_tokens = params.n * sum(
            (own.max_tokens or max(0, context - len(prompt))) + (len(prompt) if own.prompt_logprobs is not None else 0)
            for own, prompt in zip(own_params, prompts, strict=True)
        )
        check_reply_bytes(n_tokens, params.logprobs, whole_bytes, backend.settings.max_unread_bytes, params.n)
    stops = await backend.off_loop(sum(map(len, params.stop)) > OFF_LOOP_ITEMS, lambda: StopTables(params.stop))
    matchers = await backend.matchers(params.structured_outputs, params.n * len(prompts), readers.thoughts)
    if call.tenant and not options.queue_options.tenant:
        options = replace(options, queue_options=replace(options.queue_options, tenant=call.tenant))
    if call.tenant and not backend.settings.share_prefix_cache:
        options = replace(options, cache=replace(options.cache, salt=_salt_of(call.tenant, options.cache.salt)))
    if not options.delivered:
        return GenerationStream(
            engine.submit(prompts, own_params, call.id, stops, options, matchers), params, call, backend, readers
        )
    prepare = partial(engine.prepare, prompts, own_params, call.id, stops, options, matchers)
    handle = await backend.off_loop(sum(map(len, options.delivered)) > OFF_LOOP_RESUME, prepare)
    engine.queue(handle)
    return GenerationStream(handle, params, call, backend, readers)


def _salt_of(tenant: str, salt: str) -> str:
    """Return a salt that no other tenant can name, so that a tenant finds only its own pages in the prefix cache."""
    parts = f"{len(tenant)} {tenant} {salt}".encode(errors="surrogatepass")
    return "of a tenant: " + hashlib.blake2b(parts, digest_size=32).hexdigest()


def usage_of(n_prompt: int, n_generated: int, n_cached: int, n_thought: int = 0) -> Usage:
    """Return a usage. n_cached: prompt tokens found in the prefix cache; n_thought: generated reasoning tokens"""
    details = PromptTokensDetails(n_cached), CompletionTokensDetails(n_thought)
    return Usage(n_prompt, n_generated, n_prompt + n_generated, *details)


def _merge_deltas(a: Delta, b: Delta) -> Delta:
    """Merge two consecutive deltas of one choice."""
    return Delta(
        index=a.index,
        text=a.text + b.text,
        token_ids=a.token_ids + b.token_ids,
        logprobs=_concat_logprobs(a.logprobs, b.logprobs),
        finish_reason=b.finish_reason,
        stop_reason=b.stop_reason,
        error=b.error,
        fault=b.fault,
        prompt_logprobs=_concat_logprobs(a.prompt_logprobs, b.prompt_logprobs),
    )


def _concat_logprobs(
    a: tuple[TokenLogprobs, ...] | None, b: tuple[TokenLogprobs, ...] | None
) -> tuple[TokenLogprobs, ...] | None:
    return None if a is None and b is None else (a or ()) + (b or ())
