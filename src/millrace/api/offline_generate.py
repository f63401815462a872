"""Answers from an engine loop: `generate` for many prompts at once, `astream` to stream one.

`LLM` uses these; the server uses `service.AsyncEngine` directly.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.errors import RequestError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request import prompt_embeds
from millrace.runtime.request.prefix_cache_options import OPTIONS, CacheOptions
from millrace.runtime.request.request import DEFAULT_OPTIONS, Request, RequestOptions
from millrace.runtime.request.resume import FIELD, parse_resume_token_ids
from millrace.runtime.request.sampling_params import (
    Delta,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    with_length,
)
from millrace.runtime.structured_output.grammar import Matcher

# text, token ids, or {"prompt": text}, {"prompt_token_ids": [...]} or {"prompt_embeds": (N, hidden size)}; with one of
# these, options such as cache_salt, and resume_token_ids: the answer continues after them
Prompt = str | Sequence[int] | Mapping[str, object]


_CONTENT = frozenset(["prompt", "prompt_token_ids", prompt_embeds.FIELD])


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token at one position, in vLLM's format."""

    logprob: float
    rank: int  # 1 is the likeliest of the vocabulary
    decoded_token: str  # the single token; an incomplete character is U+FFFD


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # a dict per token: the chosen one first, then the likeliest
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with FinishReason.ERROR or ABORT: what happened


@dataclass(slots=True)
class RequestOutput:
    """`outputs[0].text` is the answer; `seed` is the seed that was used, to reproduce it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # if requested; None for the first token
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None before the lookup


class Progress(NamedTuple):
    """Passed to a progress callback whenever output arrives."""

    n_finished: int  # requests
    n_requests: int
    n_output_tokens: int


def new_output(request: Request, prompt: str | None = None) -> RequestOutput:
    """Create the output of a newly submitted request. prompt: its text, if given as text"""
    outputs = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(request.resolved.n)]
    ids = [] if request.rows is not None else request.prompt.tolist()
    scored: list[dict[int, Logprob] | None] | None = None if request.resolved.prompt_top is None else [None]
    seed = request.resolved.seed
    return RequestOutput(request.id, prompt, ids, outputs, finished=False, seed=seed, prompt_logprobs=scored)


class Collector:
    """Collects the deltas of one request in its RequestOutput."""

    def __init__(self, output: RequestOutput, tokenizer: Tokenizer, *, text: bool = True) -> None:
        """output: from `new_output`, to fill; text: False for token ids only"""
        self.output = output
        self._text = text
        self._n_open = len(output.outputs)
        self._tokenizer = tokenizer

    def add(self, deltas: list[Delta]) -> int:
        """Append deltas; return the number of new tokens."""
        for delta in deltas:
            choice = self.output.outputs[delta.index]
            if delta.prompt_logprobs is not None and self.output.prompt_logprobs is not None and choice.index == 0:
                self.output.prompt_logprobs += map(self._logprobs_by_id, delta.prompt_logprobs)
            choice.text += delta.text if self._text else ""
            choice.token_ids.extend(delta.token_ids)
            for token in delta.logprobs or ():
                choice.logprobs = [] if choice.logprobs is None else choice.logprobs
                choice.logprobs.append(self._logprobs_by_id(token))
                choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + token.logprob
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                choice.error = delta.error
                self._n_open -= 1
        self.output.finished = self._n_open == 0
        return sum(len(d.token_ids) for d in deltas)

    def _logprobs_by_id(self, token: TokenLogprobs) -> dict[int, Logprob]:
        """Return the chosen token and its alternatives, best first."""
        chosen = (token.token_id, token.logprob, token.rank)
        ranked = [chosen, *((i, p, rank) for rank, (i, p) in enumerate(token.top, 1) if i != token.token_id)]
        return {i: Logprob(p, rank, self._tokenizer.token_text(i)) for i, p, rank in ranked}


def generate(
    loop: EngineLoop,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    progress: Callable[[Progress], None] | None = None,
    *,
    continues: bool = False,
) -> list[RequestOutput]:
    """Answer all prompts, in order. Uses the loop's thread, or steps the loop itself if it has none.

    continues: the prompts are texts to continue, whose answers are short by default.

    A failed request has FinishReason.ERROR and an `error`; the others are complete.
    raises RequestError, before anything runs, if a prompt or its params are invalid.
    """
    done: dict[int, RequestOutput] = {}
    n_tokens = 0
    with closing(incoming(loop, prompts, params, continues=continues)) as arrived:
        for i, output, n_new in arrived:
            n_tokens += n_new
            if output.finished:
                done[i] = output
            if progress is not None:
                progress(Progress(len(done), len(prompts), n_tokens))
    return [done[i] for i in range(len(prompts))]


def incoming(
    loop: EngineLoop,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    continues: bool = False,
) -> Generator[tuple[int, RequestOutput, int], None, None]:
    """Yield (index of a prompt, its partial output, number of new tokens) whenever output arrives.

    Otherwise like `generate`. Closing it cancels unfinished requests.
    """
    arrived: queue.SimpleQueue[tuple[int, list[Delta]]] = queue.SimpleQueue()
    collectors: list[Collector] = []
    requests: list[Request] = []
    try:
        for i, (prompt, resolved) in enumerate(zip(prompts, _per_prompt(params, len(prompts)), strict=True)):
            text, ids = _text_and_tokens(loop, prompt)
            resolved = with_length(resolved, len(ids), loop.limits.context_tokens) if continues else resolved

            def deliver(deltas: list[Delta], i: int = i) -> None:
                arrived.put((i, deltas))

            matchers = (
                loop.grammars.matchers(resolved.structured_outputs, resolved.n) if resolved.structured_outputs else ()
            )
            request = loop.submit(ids, resolved, deliver, options=prompt_options(prompt), matchers=matchers)
            requests.append(request)
            collectors.append(Collector(new_output(request, text), loop.tokenizer, text=resolved.detokenize))
        n_finished = 0
        while n_finished < len(requests):
            if not loop.thread.running and arrived.empty():
                loop.step()
                continue
            i, deltas = arrived.get()
            n_new, output = collectors[i].add(deltas), collectors[i].output
            n_finished += output.finished
            output.num_cached_tokens = requests[i].n_cached
            yield i, output, n_new
    finally:  # an invalid prompt or Ctrl-C: leave nothing running
        unfinished = [r for r in requests if r.timings.finished_s is None]
        for request in unfinished:
            loop.cancel(request)
        if unfinished and not loop.thread.running:
            loop.step()


async def astream(
    loop: EngineLoop, prompt: Prompt, params: SamplingParams | None = None, *, continues: bool = False
) -> AsyncIterator[RequestOutput]:
    """Yield the partial RequestOutput, the same object each time, until it is finished. Leaving early cancels.

    The loop runs in its own thread; any number of streams may read from it, in any event loops.
    raises RequestError, and BusyError if the loop has stopped
    """
    assert loop.thread.running, "a stream needs somebody who steps"
    resolved = params or SamplingParams()
    text, ids = _text_and_tokens(loop, prompt)
    resolved = with_length(resolved, len(ids), loop.limits.context_tokens) if continues else resolved
    here, arrived = asyncio.get_running_loop(), asyncio.Queue[list[Delta]]()
    outputs_spec, matchers = resolved.structured_outputs, list[Matcher]()
    if outputs_spec is not None:
        matchers = await asyncio.to_thread(loop.grammars.matchers, outputs_spec, resolved.n)

    def deliver(deltas: list[Delta]) -> None:  # in the engine thread
        with suppress(RuntimeError):  # the event loop is closed: there is no reader any more
            here.call_soon_threadsafe(arrived.put_nowait, deltas)

    request = loop.submit(ids, resolved, deliver, options=prompt_options(prompt), matchers=matchers)
    collector = Collector(new_output(request, text), loop.tokenizer, text=resolved.detokenize)
    try:
        while not collector.output.finished:
            collector.add(await arrived.get())
            collector.output.num_cached_tokens = request.n_cached
            yield collector.output
    finally:
        loop.cancel(request)  # has no effect if it is finished


def _text_and_tokens(loop: EngineLoop, prompt: Prompt) -> tuple[str | None, Sequence[int] | prompt_embeds.Rows]:
    """Like `prompt_tokens`, or embedding rows if the prompt is given as those. raises RequestError"""
    if isinstance(prompt, Mapping) and _content(prompt).keys() == {prompt_embeds.FIELD}:
        return None, prompt_embeds.to_rows(prompt[prompt_embeds.FIELD], loop.limits)
    return prompt_tokens(loop.tokenizer, prompt)


def _content(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt's fields without options."""
    return {key: value for key, value in prompt.items() if key not in OPTIONS and key != FIELD}


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
    """Return (the text if given as text, token ids). raises RequestError if it is not a prompt"""
    if isinstance(prompt, Mapping):
        content = _content(prompt)
        if len(content) != 1 or not content.keys() <= _CONTENT - {prompt_embeds.FIELD}:
            other = [name for name in map(str, content) if name not in _CONTENT]
            raise _not_a_prompt(
                f"a dict with {other[0]}" if other else f"a dict with {sorted(content) or 'no content'}"
            )
        (key, value), *_ = content.items()
        if isinstance(value, str) != (key == "prompt"):
            raise _not_a_prompt(f"{key} of type {type(value).__name__}")
    else:
        value = prompt
    if isinstance(value, str):
        return value, tokenizer.encode(value)
    if not isinstance(value, Sequence):
        raise _not_a_prompt(f"of type {type(value).__name__}")
    return None, value


def prompt_options(prompt: Prompt) -> RequestOptions:
    """Return the request options of a prompt. raises RequestError naming the field"""
    fields = prompt if isinstance(prompt, Mapping) else {}
    options: dict[str, Any] = {key.removeprefix("cache_"): value for key, value in fields.items() if key in OPTIONS}
    delivered = parse_resume_token_ids(fields.get(FIELD))
    if not options and not delivered:
        return DEFAULT_OPTIONS
    return RequestOptions(cache=CacheOptions(**options), delivered=delivered)


def _not_a_prompt(what: str) -> RequestError:
    return RequestError(
        f"a prompt is {what}",
        'a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": [...]} or {"prompt_embeds": rows}',
        "pass one of these for each prompt",
        param="prompt",
    )


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
    several = params if isinstance(params, Sequence) else [params or SamplingParams()]
    for one in several:
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"sampling_params is of type {type(params).__name__}", "SamplingParams, or a list of them",
                "write SamplingParams(max_tokens=64)", param="sampling_params",
            )  # fmt: skip
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if len(params) != n:
        raise RequestError(
            f"{len(params)} SamplingParams for {n} prompts", "one for all, or one each", "make the lists equally long"
        )
    return params
