"""POST /v1/completions: continuations of one or several prompts, given as texts or token ids."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.errors import RequestError
from millrace.runtime.request.prompt_embeds import EmbeddedPrompt
from millrace.runtime.request.request import Request
from millrace.runtime.request.resume import FIELD, parse_resume_token_ids
from millrace.runtime.request.sampling_params import Delta, FinishReason, check_context
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_BODY
from millrace.serve.llm.answer_blocks import BlockKind
from millrace.serve.llm.event_stream import EventStream, StreamUsage, TextDeltaEncoder, encode_events
from millrace.serve.llm.generation_stream import GenerationStream, submit_prompts, usage_of
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.logprobs import COMPLETION_BYTES, CollectedCompletionLogprobs, Echo, OffsetLogprobs
from millrace.serve.llm.non_streaming import CollectedChoice, collect_answer
from millrace.serve.llm.request_decoding import (
    completion_params,
    drop_large_fields,
    request_options,
    requests_receipt,
    texts_or_ids,
)
from millrace.serve.llm.request_types import CompletionRequest
from millrace.serve.llm.response_types import CompletionLogprobs, SeedEcho, Usage
from millrace.serve.protocols.openai.embedding_rows import embedding_rows
from millrace.serve.protocols.openai.replies import CompletionChoice, CompletionReply

_ID_BYTES = 8  # of a token id, as text


async def completions(backend: TextBackend, call: RequestContext, request: CompletionRequest) -> ASGIApp:
    """Return the response, or the stream. raises MillraceError"""
    model = call.model
    params, options = completion_params(request), request_options(request)
    if delivered := parse_resume_token_ids(request.resume_token_ids):
        options = replace(options, delivered=delivered)
    max_tokens = request.max_tokens or None  # 0: an echo alone, which needs room for the token that is drawn
    special = request.add_special_tokens is not False
    rows = await _rows(request, call, backend)
    inputs = _prompts(request.prompt, params.n, max_tokens, backend) if rows is None else []
    tokens = await _tokens(backend, inputs, max_tokens, special)
    prompts: Sequence[list[int] | EmbeddedPrompt] = tokens if rows is None else [rows]
    echoes = None
    if request.echo:
        pairs = zip(inputs, tokens, strict=True)
        echoes = [await backend.texts.echo(prompt, ids, special, params.skip_special_tokens) for prompt, ids in pairs]
    drop_large_fields(request)
    inputs = []
    whole_bytes = None if request.stream else COMPLETION_BYTES
    with_receipt = requests_receipt(request, len(prompts))
    if delivered and (len(prompts) > 1 or with_receipt or request.echo):
        message = "echo" if request.echo else "a receipt" if with_receipt else f"{len(prompts)} prompts"
        raise RequestError(
            f"{FIELD} cannot be combined with {message}",
            "one prompt, without echo or receipt",
            f"leave {FIELD} out",
            FIELD,
        )
    generation = await submit_prompts(backend, prompts, params, call, options, continues=True, whole_bytes=whole_bytes)
    if with_receipt:
        generation.keep_receipt()
    prompt_only, with_ids = request.max_tokens == 0, bool(request.return_token_ids)
    answer = _CompletionAnswer(
        backend, generation, f"cmpl-{call.id}", model, echoes, prompt_only=prompt_only, with_ids=with_ids
    )
    if request.stream:
        return EventStream(generation, answer.stream(StreamUsage(request.stream_options, generation)))
    return await answer.response()


class _CompletionAnswer:
    """One completion request in progress.

    echoes: the prompts to return, or None; prompt_only: return nothing but the prompt (the engine samples at least one
    token, which is left out); with_ids: return token ids
    """

    def __init__(
        self, backend: TextBackend, generation: GenerationStream, answer_id: str, model: str, echoes: list[Echo] | None,
        prompt_only: bool, with_ids: bool,
    ) -> None:  # fmt: skip
        self._backend, self._generation = backend, generation
        self._id, self._model, self._created = answer_id, model, int(time.time())
        self._echoes, self._prompt_only = echoes, prompt_only
        self._with_ids, self._begun = with_ids, set[int]()  # choices whose prompt_token_ids have been sent
        self._with_top = bool(generation.params.logprobs)
        self._offsets: list[OffsetLogprobs] = []
        params = generation.params
        if params.logprobs is not None:
            tokenizer, skip = backend.model.tokenizer, params.skip_special_tokens
            self._offsets = [
                OffsetLogprobs(tokenizer, _text_before(request, delivered), skip, echoes[i] if echoes else None)
                for i, request in enumerate(generation.handle.requests)
                for delivered in request.options.delivered or [()] * params.n
            ]

    async def response(self) -> Response:
        """Return the complete response. raises GenerationFailedError"""
        logprobs = [CollectedCompletionLogprobs() for _ in range(self._generation.n_choices)]
        for choice, piece in self._first_logprobs():
            logprobs[choice].add(piece)

        ids: list[list[int]] = [[] for _ in logprobs]

        def encode_logprobs(delta: Delta) -> int:
            n_bytes = 0
            if self._with_ids:
                ids[delta.index] += delta.token_ids
                n_bytes = _ID_BYTES * len(delta.token_ids)
            return n_bytes + sum(logprobs[delta.index].add(piece) for piece in self._logprobs(delta))

        async with self._generation:
            choices = await collect_answer(self._generation, self._backend, encode_logprobs)
            content = await self._backend.encode_off_loop(
                self._generation.has_many_logprobs,
                lambda: msgspec.json.encode(self._whole_reply(choices, logprobs, ids)),
            )
        return Response(content, media_type="application/json")

    def _whole_reply(
        self, collected: list[CollectedChoice], logprobs: list[CollectedCompletionLogprobs], ids: list[list[int]]
    ) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=i,
                text=self._echo(i) + ("" if self._prompt_only else choice.blocks.text(BlockKind.TEXT)),
                logprobs=logprobs[i].finish() if self._offsets else None,
                finish_reason="length" if self._prompt_only else _finish(choice.end),
                stop_reason=None if self._prompt_only else choice.end.stop_reason,
                token_ids=([] if self._prompt_only else ids[i]) if self._with_ids else UNSET,
                prompt_token_ids=self._prompt(i) if self._with_ids else UNSET,
            )
            for i, choice in enumerate(collected)
        ]
        reply = self._reply(choices)
        reply.usage, reply.millrace = self._usage, self._generation.seed_echo
        return reply

    @property
    def _usage(self) -> Usage:
        handle = self._generation.handle
        return usage_of(handle.n_prompt, 0, handle.n_cached) if self._prompt_only else self._generation.usage

    async def stream(self, usage: StreamUsage) -> AsyncIterator[bytes]:
        """Yield blocks of events. raises GenerationFailedError"""
        seed_echo: SeedEcho | None = self._generation.seed_echo  # told in the first event
        is_plain = not (self._offsets or self._prompt_only or self._with_ids or usage.always)
        plain = TextDeltaEncoder(b'"text"', partial(self._empty, usage)) if is_plain else None
        head = b""  # sent with the first token, so that clients do not take it for the first token
        if self._echoes is not None:
            echoed = [CompletionChoice(i, self._echo(i), None, None) for i in range(self._generation.n_choices)]
            for choice, piece in self._first_logprobs():
                echoed[choice].logprobs = piece
            head, seed_echo = self._events([echoed], usage, seed_echo), None
        async for deltas in self._generation:
            if plain is not None and not (head or seed_echo) and len(deltas) == 1 and deltas[0].finish_reason is None:
                if deltas[0].text:
                    yield plain.event(deltas[0].index, deltas[0].text)
                continue
            block = await self._backend.encode_off_loop(
                self._generation.is_expensive_to_encode(deltas), partial(self._block, deltas, usage, seed_echo)
            )
            if block:
                yield head + block
                head, seed_echo = b"", None
        if usage.at_end:
            last = self._reply([])
            last.usage = self._usage
            yield encode_events([last])

    def _block(self, deltas: list[Delta], usage: StreamUsage, seed_echo: SeedEcho | None) -> bytes:
        choices = [choice for delta in deltas for choice in self._choices(delta)]
        blocks = [
            [choice] for choice in choices if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids
        ]
        return self._events(blocks, usage, seed_echo) if blocks else b""

    def _empty(self, usage: StreamUsage, choice: int) -> CompletionReply:
        """Return an event in the middle of a stream with an empty text."""
        reply = self._reply([CompletionChoice(choice, "", None, None)])
        reply.usage = usage.for_choice(choice)
        return reply

    def _events(self, blocks: list[list[CompletionChoice]], usage: StreamUsage, seed_echo: SeedEcho | None) -> bytes:
        replies = [self._reply(choices) for choices in blocks]
        for reply in replies:
            reply.usage = usage.for_choice(reply.choices[0].index)
        if seed_echo is not None:
            replies[0].millrace = seed_echo
        return encode_events(replies)

    def _reply(self, choices: list[CompletionChoice]) -> CompletionReply:
        return CompletionReply(self._id, self._created, self._model, choices, self._backend.fingerprint)

    def _choices(self, delta: Delta) -> list[CompletionChoice]:
        """Return a delta's choices: mostly one, but two if it has log probabilities of prompt and answer."""
        pieces: list[CompletionLogprobs | None] = [*self._logprobs(delta)] or [None]
        choices = [CompletionChoice(delta.index, "", piece, None) for piece in pieces]
        if not self._prompt_only:
            choices[-1].text = delta.text
        if self._with_ids:
            choices[-1].token_ids = [] if self._prompt_only else list(delta.token_ids)
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                choices[0].prompt_token_ids = self._prompt(delta.index)
        if delta.finish_reason is not None:
            choices[-1].finish_reason = "length" if self._prompt_only else _finish(delta)
            choices[-1].stop_reason = None if self._prompt_only else delta.stop_reason
        return choices

    def _first_logprobs(self) -> Iterator[tuple[int, CompletionLogprobs]]:
        """Yield for each choice the entry of its echoed prompt's first token."""
        if self._echoes is not None:
            for choice, offsets in enumerate(self._offsets):
                prompt = self._generation.handle.requests[choice // self._generation.params.n].prompt
                yield choice, offsets.first(int(prompt[0]), self._with_top)

    def _logprobs(self, delta: Delta) -> list[CompletionLogprobs]:
        groups = [delta.prompt_logprobs, None if self._prompt_only else delta.logprobs]
        offsets = self._offsets[delta.index] if self._offsets else None
        return [offsets.take(tokens, self._with_top) for tokens in groups if offsets is not None and tokens]

    def _prompt(self, choice: int) -> list[int]:
        return _ids(self._generation.handle.requests[choice // self._generation.params.n])

    def _echo(self, choice: int) -> str:
        return "" if self._echoes is None else self._echoes[choice // self._generation.params.n].text


def _text_before(request: Request, delivered: Sequence[int]) -> Sequence[int] | None:
    """Return the tokens that an answer's text continues; None if the prompt is only embedding rows."""
    return None if request.rows is not None and not delivered else [*_ids(request), *delivered]


def _ids(request: Request) -> list[int]:
    """Return the token ids of a prompt; none of one that is embedding rows."""
    ids: list[int] = request.prompt.tolist() if request.rows is None else []
    return ids


def _finish(delta: Delta) -> Literal["stop", "length"]:
    """Return the finish reason of a choice's last delta; errors and aborts have been raised before."""
    assert delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), delta
    return "length" if delta.finish_reason is FinishReason.LENGTH else "stop"


async def _rows(request: CompletionRequest, call: RequestContext, backend: TextBackend) -> EmbeddedPrompt | None:
    """Decode embedding rows, off the event loop if they are large. raises RequestError, BusyError"""
    embeds = request.prompt_embeds
    if embeds is None:
        return None
    _check_number(request.n or 1, backend)
    conflict = "prompt" if request.prompt else "echo" if request.echo else "receipt" if request.receipt else ""
    if conflict:
        raise RequestError(
            f"prompt_embeds and {conflict} are both set", "one of them", f"leave {conflict} out", conflict
        )
    limits = backend.model.engine.limits
    return await backend.off_loop(
        call.body_bytes > OFF_LOOP_BODY, lambda: EmbeddedPrompt.from_rows(embedding_rows(embeds, limits), limits)
    )


def _prompts(
    prompt: str | list[str | int | list[int]] | None, n: int, max_tokens: int | None, backend: TextBackend
) -> list[str | list[int]]:
    """Return prompts, written in any of four ways, as texts and token-id lists; overlong ones are refused first."""
    if prompt is None:
        raise RequestError("prompt is missing", "a text, token ids, or several", "add prompt", "prompt")
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    _check_number((1 if is_one else len(prompt)) * n, backend)
    if is_one and not isinstance(prompt, str):
        check_context(len(prompt), max_tokens, backend.model.engine.limits.context_tokens, "prompt")
    return [*texts_or_ids(prompt, "prompt")]


def _check_number(n_sequences: int, backend: TextBackend) -> None:
    if n_sequences > (limit := backend.capacity):
        raise RequestError(
            f"the prompts times n are {n_sequences} answers",
            f"at most {limit}, which is what the queue holds",
            "send several requests",
            param="prompt",
        )


async def _tokens(
    backend: TextBackend, inputs: list[str | list[int]], max_tokens: int | None, special: bool
) -> list[list[int]]:
    """Return the tokens of prompts, which are all texts or all token ids."""
    texts = [prompt for prompt in inputs if isinstance(prompt, str)]
    prompts = [prompt for prompt in inputs if not isinstance(prompt, str)]
    if texts:
        prompts = [list(ids) for ids in await backend.texts.encode(texts, special, "prompt")]
    for ids in prompts:
        check_context(len(ids), max_tokens, backend.model.engine.limits.context_tokens, "prompt")
    return prompts
