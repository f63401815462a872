"""Language-model backend: chats, completions, tokenisation and detokenisation."""

import asyncio
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from millrace import __version__
from millrace.checkpoint.chat.chat_prompt import PromptRenderer
from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer, check_unicode
from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.decode_roofline import DecodeWork
from millrace.errors import CheckpointError, MillraceError, RequestError
from millrace.machine.roofline import Roofline
from millrace.prometheus import MetricFamily
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams, context_exceeded
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.request.token_lower_bound import TokenLowerBound
from millrace.runtime.scheduling.step_cost_model import StepProfile, predicted_vs_measured
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.runtime.service import AsyncEngine
from millrace.runtime.structured_output.grammar import Matcher, ReasoningSpan
from millrace.serve.backend import Backend, ServedModel
from millrace.serve.http.bounded_executor import BoundedExecutor
from millrace.serve.http.errors import HttpError
from millrace.serve.http.server_context import ServerContext
from millrace.serve.llm.conversation import DEFAULT_RENDERING, Rendering
from millrace.serve.llm.logprobs import Echo
from millrace.serve.llm.output_parsing import OutputFormat
from millrace.serve.llm.prompt_warmup import WarmPrompt, warm_prefix_cache
from millrace.serve.llm.reasoning import ThinkingSwitch
from millrace.serve.llm.request_decoding import check_messages
from millrace.serve.llm.request_types import Message
from millrace.serve.ops.metrics import decode_metrics, engine_metrics, step_metrics

SHORT_CHARACTERS = 512  # tokenised inline: that takes less time than handing the text to a thread
LONG_CHARACTERS = 8192  # in a process of its own, which is started for the first such text
VERY_LONG_CHARACTERS = 128 * 1024  # in another one
LONG_CHAT_BYTES = 64 * 1024  # of a request's body; rendered in another process than shorter ones
MAX_EXTRA_BYTES = 64 * 1024  # of chat_template_kwargs
_EXTRA = "chat_template_kwargs"
# They have the normal priority: the engine would wait for a niced thread that holds the interpreter lock.
N_THREADS = 2
N_GRAMMARS = 8  # threads for short ones, and as many for long ones: most of them wait for the process that compiles


class TextProcessor:
    """Tokenises, detokenises and renders chats. At most `max_pending` calls wait or run in each executor."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, max_pending: int, max_context: int,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """folder: the tokenizer's files; if given, long texts are tokenised in processes of their own"""
        self.tokenizer = tokenizer
        self._max_context = max_context
        self._lower_bound = TokenLowerBound(tokenizer, max_context)
        self._medium = _Encoder(tokenizer, None, BoundedExecutor("text", max_pending, N_THREADS))
        self._decoding = BoundedExecutor("decode", max_pending)
        self._long, self._very_long = (_make_encoder(tokenizer, folder, n, max_pending) for n in ("long", "very-long"))
        # a template that loops must not hold up completions as well, so renderings have lanes of their own
        self.speech = OutputFormat("" if template is None else template.source, tokenizer)
        has_own = template is not None and template.name_for(True) != template.name_for(False)
        self.speech_of_tools = (
            OutputFormat(template.source_for(True), tokenizer) if template and has_own else self.speech
        )
        self._chats = None if template is None else _Renderer(template, "chat", max_pending)
        self.never_thinks = self._chats is None or all(
            switch.changes_nothing for switch in self._chats.switches.values()
        )
        self._long_chats = None if template is None else _Renderer(template.separate_copy(), "long-chat", max_pending)

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, bounded_field: str | None = None
    ) -> list[Sequence[int]]:
        """Return the tokens of each text.

        bounded_field: the field that an error names if a text, by its bytes or words, cannot fit the context
        raises RequestError for invalid Unicode, HttpError for a text that is too long, BusyError
        """
        n = sum(map(len, texts))
        if n <= SHORT_CHARACTERS:
            return [self._medium.encode(text, add_special_tokens) for text in texts]
        encoder = self._medium if n <= LONG_CHARACTERS else self._long if n <= VERY_LONG_CHARACTERS else self._very_long

        def work() -> list[Sequence[int]]:
            if bounded_field is not None and n > LONG_CHARACTERS:
                for text in texts:
                    self._lower_bound.check(text, bounded_field)
            return [encoder.encode(text, add_special_tokens) for text in texts]

        return await encoder.lane.run(work, n)

    def pause_workers_while_stepping(self, on_all_cores: bool) -> None:
        """Pause the tokeniser processes while a step uses all cores. Called from the engine's thread."""
        self._long.pause(on_all_cores)
        self._very_long.pause(on_all_cores)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """raises BusyError"""
        if len(ids) <= SHORT_CHARACTERS:
            return self.tokenizer.decode(ids, skip_special_tokens)
        return await self._decoding.run(lambda: self.tokenizer.decode(ids, skip_special_tokens))

    async def echo(self, prompt: str | Sequence[int], ids: Sequence[int], special: bool, skip: bool) -> Echo:
        """Return a prompt, given as a text or as tokens, in the form that an echo returns.

        special: special tokens were added around a text. skip: special tokens among token ids are not shown
        raises BusyError
        """
        tokenizer = self.tokenizer

        def work() -> Echo:
            if not isinstance(prompt, str):
                return Echo.of_ids(tokenizer, ids, skip)
            return Echo.of_text(tokenizer, prompt, ids, tokenizer.special_around if special else (0, 0))

        return work() if len(ids) <= SHORT_CHARACTERS else await self._decoding.run(work)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        body_bytes: int = 0,
        bounded: bool = True,
    ) -> Sequence[int]:
        """Check, render and encode messages.

        tools: as clients describe them; body_bytes: size of the request body, an upper bound of the messages' size
        bounded: refuse what cannot fit the context by its bytes or words
        raises HttpError without a template or if it cannot fit, what ChatTemplate.render raises; BusyError
        """
        renderer = self._chats if body_bytes <= LONG_CHAT_BYTES else self._long_chats
        if renderer is None:
            raise HttpError(
                400,
                "no_chat_template",
                "this model has no chat template",
                "a prompt as text: /v1/completions, or raw at /api/generate",
                "send the whole prompt as text, or serve a model that has a chat template",
            )
        if len(messages) > self._max_context:  # each costs a token at least
            raise context_exceeded(self._max_context, f"at least {len(messages)}", None, "messages")

        def render() -> str:
            if bounded and body_bytes > LONG_CHAT_BYTES:
                self._lower_bound.check("".join(_contents(messages)), "messages")
            if (n_bytes := len(msgspec.json.encode(rendering.extra))) > MAX_EXTRA_BYTES:
                raise RequestError(
                    f"chat_template_kwargs has {n_bytes} bytes", f"at most {MAX_EXTRA_BYTES}", "send less", _EXTRA
                )
            return renderer.render(check_messages(messages), rendering, tools)

        text = await renderer.lane.run(render, body_bytes)
        return (await self.encode([text], rendering.add_special_tokens, "messages" if bounded else None))[0]

    def close(self) -> None:
        """Close all executors without waiting for running work."""
        self._decoding.close()
        for part in (self._medium, self._long, self._very_long, self._chats, self._long_chats):
            if part is not None:
                part.lane.close()


class _Encoder:
    """A tokenizer with its executor. process: a process that tokenises instead of this one"""

    def __init__(self, tokenizer: Tokenizer, process: TokenizerProcess | None, lane: BoundedExecutor) -> None:
        self._tokenizer, self._process, self.lane = tokenizer, process, lane

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        """Tokenise a text. raises RequestError, HttpError if the tokenizer or its process fails"""
        try:
            if self._process is None:
                return self._tokenizer.encode(text, add_special_tokens)
            check_unicode(text)
            return self._process.encode(text, add_special_tokens)
        except CheckpointError as error:
            refusal = HttpError(503, "tokenizer_failed", error.what, error.expected, error.fix)
            refusal.headers["retry-after"] = "10"
            raise refusal from None

    def pause(self, paused: bool) -> None:
        if self._process is not None:
            self._process.hold(paused)


def _make_encoder(tokenizer: Tokenizer, folder: Path | None, name: str, max_pending: int) -> _Encoder:
    process = None if folder is None else TokenizerProcess(folder)
    stop: Callable[[], None] | None = None if process is None else process.close
    return _Encoder(tokenizer, process, BoundedExecutor(f"{name}-text", max_pending, stop=stop))


class _Renderer:
    """A chat template with its executor."""

    def __init__(self, template: ChatTemplate, name: str, max_pending: int) -> None:
        self._prompts = PromptRenderer(template)
        self.switches = {has: ThinkingSwitch(template.source_for(has)) for has in (False, True)}
        self.lane = BoundedExecutor(name, max_pending, stop=template.close)

    def render(
        self, messages: Sequence[dict[str, object]], rendering: Rendering, tools: Sequence[Mapping[str, object]]
    ) -> str:
        """Render messages to a prompt. raises what ChatTemplate.render raises"""
        return self._prompts.render(
            messages, tools, add_generation_prompt=rendering.opens, continue_final_message=rendering.continued,
            extra={**self.switches[bool(tools)].variables(rendering.thinking), **rendering.extra},
        )  # fmt: skip


def _contents(messages: Sequence[Message]) -> "itertools.chain[str]":
    """Return every text of the messages."""
    return itertools.chain.from_iterable(
        (m.content,) if isinstance(m.content, str) else (part.text for part in m.content or ()) for m in messages
    )


T = TypeVar("T")
WARM_UP_TOKENS = 2
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeRoofline:
    """The least time of a decode step on this machine, to compare with the measured time."""

    work: DecodeWork
    roofline: Roofline
    budget: TokenBudget  # the engine loop's, which follows the steps without prompt tokens

    def bound_s(self, stats: LoopStats) -> float:
        """Return the least time of a step with the running sequences, or with one new sequence if none runs."""
        n_full = max(0, stats.pages_used - stats.running) * PAGE_TOKENS  # a sequence's last page may be almost empty
        return self.work.bound(self.roofline, max(1, stats.running), n_full).seconds


@dataclass(frozen=True, kw_only=True)
class TextModel(ServedModel):
    """A language model. The server starts and closes `engine`; whatever created its executor closes that."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    tokenizer_folder: Path | None = None  # where a process for long texts finds it; None: they go to a thread
    chat_template: ChatTemplate | None
    decode_clock: DecodeRoofline | None = None  # None: no roofline was measured here
    warm_prompts: tuple[WarmPrompt, ...] = ()  # computed before the server is ready
    profile: StepProfile | None = None  # what its steps should take here

    def backend(self, serving: ServerContext) -> "TextBackend":
        return TextBackend(self, serving)


class TextBackend(Backend):
    """A language model with its text processing and its executors."""

    kind_name = "a language model"

    def __init__(self, model: TextModel, serving: ServerContext) -> None:
        super().__init__(model, serving)
        self.model: TextModel = model
        self.unsent, self.off_loop = serving.unsent, serving.off_loop
        self.responses, self.in_background = serving.responses, serving.in_background
        self.texts = TextProcessor(
            model.tokenizer, model.chat_template, serving.settings.max_preparing, model.max_context,
            model.tokenizer_folder,
        )  # fmt: skip
        self._grammars = BoundedExecutor("grammar", serving.settings.max_preparing, N_GRAMMARS)
        self._long_grammars = BoundedExecutor("grammar-long", serving.settings.max_preparing, N_GRAMMARS)
        self._answers = BoundedExecutor("answers", self.capacity)  # has room for every answer of the engine

    @property
    def capacity(self) -> int:
        """Return how many sequences may wait or run at a time."""
        engine = self.model.engine
        return engine.options.max_queued + engine.limits.max_sequences

    @property
    def defaults(self) -> Mapping[str, object]:
        return self.model.engine.loop.defaults.sampling

    @property
    def defaults_origin(self) -> str:
        return self.model.engine.loop.defaults.origin

    @cached_property
    def fingerprint(self) -> str:
        """Return `system_fingerprint`, a digest of release, model, engine, precision."""
        metadata = self.model.metadata
        parts = [__version__, self.model.name, metadata.get("engine"), metadata.get("precision")]
        return "fp_" + hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=5).hexdigest()

    async def encode_off_loop(self, is_large: bool, work: Callable[[], T]) -> T:
        """Run work on computed answers off the event loop; the executor has room for every answer."""
        return await self._answers.run(work) if is_large else work()

    @property
    def speech(self) -> OutputFormat:
        """Return the format of reasoning and of tool calls in a conversation without tools."""
        return self.texts.speech

    def speech_for(self, has_tools: bool) -> OutputFormat:
        """Return the format of tool calls and reasoning; some models have a separate chat template for tools."""
        return self.texts.speech_of_tools if has_tools else self.texts.speech

    async def matchers(
        self, constraint: StructuredOutputsParams | None, n: int, thoughts: ReasoningSpan | None = None
    ) -> Sequence[Matcher]:
        """Compile a constraint for n answers, off the event loop. raises RequestError, BusyError, MachineError

        thoughts: the reasoning that may precede each answer
        """
        if constraint is None:
            return ()
        grammars = self.model.engine.grammars
        lane = self._grammars if constraint.is_short else self._long_grammars
        return await lane.run(lambda: grammars.matchers(constraint, n, thoughts))

    def start(self) -> None:
        self.model.engine.start(self.texts.pause_workers_while_stepping)

    async def warm_up(self) -> str | None:
        """Warm up engine, chat template and grammars concurrently, then the prefix cache; return an error, or None."""
        grammars = self._grammars.run(self.model.engine.grammars.prepare)
        trouble, *_ = await asyncio.gather(self._warm_up_engine(), self._warm_up_template(), grammars)
        if self.model.warm_prompts and len(self.settings.keys) > 1 and not self.settings.share_prefix_cache:
            log.warning("warm prompts are of no use to API keys, which do not share the prefix cache")
        return trouble or await warm_prefix_cache(self.model.warm_prompts, self._warm_tokens, self.model.engine)

    async def _warm_tokens(self, prompt: WarmPrompt) -> list[int]:
        """Tokenise a warm prompt. A conversation ends where its next message begins. raises MillraceError"""
        line = prompt.line
        if line.messages is None:
            return list((await self.texts.encode([line.prompt or ""], True, "prompt"))[0])
        rendering = Rendering(line.chat_template_kwargs or {}, opens=False)
        return list(await self.texts.encode_chat(line.messages, rendering, body_bytes=prompt.n_bytes))

    def health(self) -> LoopStats:
        return self.model.engine.stats()

    def collect(self) -> Iterator[MetricFamily]:
        stats, clock = self.model.engine.stats(), self.model.decode_clock
        yield from engine_metrics(self.model.name, stats, self.model.engine.limits)
        if clock is not None:
            yield from decode_metrics(self.model.name, clock.bound_s(stats), clock.budget.step_s)
        profile, steps = self.model.profile, tuple(self.model.engine.loop.history.steps)
        if profile is not None and (comparison := predicted_vs_measured(profile, steps)) is not None:
            yield from step_metrics(self.model.name, *comparison)

    async def abort(self, within_s: float) -> None:
        await self.model.engine.close(within_s)
        self.texts.close()
        self._grammars.close()
        self._long_grammars.close()

    def close(self) -> None:
        self.texts.close()
        self._grammars.close()
        self._long_grammars.close()
        self._answers.close()

    @property
    def stuck(self) -> bool:
        return self.model.engine.stuck

    async def _warm_up_engine(self) -> str | None:
        engine, tokenizer = self.model.engine, self.model.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id or 0
        n_tokens = max(1, min(WARM_UP_TOKENS, self.model.max_context - 1))
        params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True, seed=0)
        try:
            async with engine.submit([[token]], [params], "warm-up") as handle:
                async for deltas in handle:
                    for delta in deltas:
                        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                            return delta.error or "it was aborted"
        except MillraceError as error:
            return str(error)
        return None

    async def _warm_up_template(self) -> None:
        if self.model.chat_template is None:
            return
        try:
            await self.texts.encode_chat([Message(role="user", content="Hi")])
        except MillraceError as error:  # completions still work, and every chat gets the error
            log.warning("the chat template does not render a greeting: %s", error)
