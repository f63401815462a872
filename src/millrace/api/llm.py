"""`LLM`: a model in this process, with an interface like vLLM's and TensorRT-LLM's."""

import logging
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from millrace.api import compat_vllm
from millrace.api.embeddings import EmbeddingRequestOutput, embed
from millrace.api.hf_tokenizer import HfTokenizer
from millrace.api.offline_generate import Progress, Prompt, RequestOutput, astream, generate
from millrace.api.scores import Scorer, ScoringRequestOutput
from millrace.checkpoint.chat.chat_prompt import PromptRenderer
from millrace.checkpoint.chat.chat_template import normalised
from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.env import is_plain_terminal, read_env
from millrace.errors import CheckpointError, ConfigError, MillraceError, RequestError, close_matches, nearest, sanitize
from millrace.runtime.encoder_loop import EncoderLoop
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import OpenedEncoder, RunningModel, open_any
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.request.tool_specs import checked_tools
from millrace.runtime.settings import RunSettings
from millrace.tune.precision_selector import precision_selector

Message = Mapping[str, object]
_LOG = logging.getLogger("millrace")  # messages of a build; shown if the application configures logging
_FLAGS = "|".join(f.name.replace("_", "-") for kind in (BuildSettings, RunSettings) for f in fields(kind))
_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_GENERATE = frozenset({"prompts", "sampling_params", "use_tqdm"})
_CHAT = frozenset({
    "messages", "sampling_params", "use_tqdm", "add_generation_prompt", "chat_template_kwargs", "tools",
})  # fmt: skip
_EMBED = frozenset({"prompts", "truncate_prompt_tokens", "use_tqdm"})
_SCORE = frozenset({"data_1", "data_2", "truncate_prompt_tokens", "use_tqdm"})
_CAN = {True: "embed()", False: "generate(), chat() and astream()"}
_FLAG = re.compile(rf"(?<!\S)--(no-)?({_FLAGS})(?![\w-])( (?=[\d\"]|auto\b))?")


def _split(settings: Mapping[str, Any]) -> tuple[BuildSettings, RunSettings, Mapping[str, str] | None]:
    """Return the settings, and the precision if it is a map. raises ConfigError for an unknown name"""
    build, run = ({f.name for f in fields(kind)} for kind in (BuildSettings, RunSettings))
    for name in settings:
        if name not in (valid_names := build | run | compat_vllm.VALID_NAMES):
            meant = close_matches(name, valid_names)
            fix = f"write {meant}=" if meant else "leave it out; help(LLM) says what there is"
            raise ConfigError(f'LLM has no setting "{name}"', nearest(name, valid_names, build | run), fix)
    ours = compat_vllm.translated(settings)
    precisions = ours.pop("precision") if isinstance(ours.get("precision"), Mapping) else None
    for_build, for_run = ({name: v for name, v in ours.items() if name in own} for own in (build, run))
    return BuildSettings(**for_build), RunSettings(**for_run), precisions


def _as_arguments(text: str, given_as: Mapping[str, str]) -> str:
    """Replace `--max-context 512` by `max_context=512`, `--no-evaluate` by `evaluate=False`, or the caller's name."""

    def argument(flag: re.Match[str]) -> str:
        name = flag[2].replace("-", "_")
        return given_as.get(name, name) + ("=False" if flag[1] else "=" if flag[3] else "")

    return _FLAG.sub(argument, text)


@contextmanager
def _in_python_words(given_as: Mapping[str, str]) -> Iterator[None]:
    """Rewrite errors, which name settings as flags (--max-context), to name arguments (max_context=).

    given_as: our name -> the caller's, for settings with other libraries' names (max_model_len=)
    """
    try:
        yield
    except MillraceError as error:
        error.reworded(lambda text: _as_arguments(text, given_as))
        raise


def _open(
    name: str, engine: Engine, run: RunSettings, embeds: bool | None
) -> tuple[RunningModel | OpenedEncoder, EngineLoop | EncoderLoop]:
    """Open the model. embeds: whether an encoder is requested; None: the model decides. raises ConfigError"""
    encoder = engine.manifest.is_encoder
    if embeds not in (None, encoder):
        raise ConfigError(
            f"{name} is {'an encoder' if encoder else 'a language model'}, which cannot {_CAN[not encoder]}",
            f'task="{"embed" if encoder else "generate"}", which it can: {_CAN[encoder]}',
            "leave task, runner and convert out, or choose another model",
        )  # fmt: skip
    opened = open_any(name, engine, run)
    return opened, opened.loop(opened.for_throughput()) if isinstance(opened, RunningModel) else opened.loop()


def _release(loop: EngineLoop | EncoderLoop, opened: RunningModel | OpenedEncoder, made_in: int) -> None:
    """Stop the engine's thread, then release the memory."""
    if os.getpid() != made_in:  # a forked child: threads and memory belong to the parent
        return
    if loop.thread.is_current:  # a thread cannot join itself, and garbage collection may run in any thread
        threading.Thread(target=_release, args=(loop, opened, made_in)).start()
        return
    loop.stop()
    opened.close()


def _prompts(prompts: object) -> Sequence[Prompt]:
    """Return prompts as a list, also for a single one. raises RequestError if they are neither"""
    if isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int)
    ):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}", "a prompt or a list of prompts", "pass one of these"
        )
    return prompts


@contextmanager
def _progress_bar(shown: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show finished requests and tokens per second on stderr while they run."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
    )  # fmt: skip
    console = Console(stderr=True, force_terminal=False if is_plain_terminal() else None)
    with Bars(*columns, console=console) as bars:
        task = bars.add_task("", total=None, tokens=0)
        yield lambda now: bars.update(task, completed=now.n_finished, total=now.n_requests, tokens=now.n_output_tokens)


class LLM:
    """`LLM("tiny").generate(["Once upon a time"], SamplingParams(max_tokens=64))[0].outputs[0].text`.

    model: an engine or checkpoint folder, a GGUF file, a hub id (`org/name@revision`) or `tiny`; built if needed.
    precision: a name, "auto", or a map like {"default": "w4a8", "lm_head": "bf16"}; its accuracy loss is measured.
    settings: those of `millrace build` and `serve`, with the same names (head, kv_cache_dtype, group, max_kl, evaluate,
    calibration, max_context, max_batch, tune, kv_memory, threads, prefix_cache, isa, device="cuda"), and vLLM's
    (max_model_len, max_num_seqs, dtype, enable_prefix_caching, tensor_parallel_size=1).
    Other libraries' arguments of calls are accepted if they match the actual behavior (lora_request=None).
    raises MillraceError, with a fix in the message
    """

    def __init__(self, model: str | Path, *, precision: str | Mapping[str, str] | None = None, **settings: Any) -> None:
        self._given_as = compat_vllm.as_given(settings)
        with _in_python_words(self._given_as):
            build, run, precisions = _split({"precision": precision, **settings})
            name, engine = find_engine(
                str(model), build, read_env(), say=_LOG.info, precisions=precisions,
                new_selector=precision_selector, place=run.place,
            )  # fmt: skip
            self._opened, self._loop = _open(name, engine, run, compat_vllm.asks_for_embeddings(settings))
        self._threading = threading.Lock()
        self._made_in = os.getpid()
        # also if the caller forgets close()
        self._released = weakref.finalize(self, _release, self._loop, self._opened, self._made_in)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **other_arguments: object,
    ) -> list[RequestOutput]:
        """Answer prompts with in-flight batching, in order. A prompt: text, or {"prompt_token_ids": [...]}.

        Without max_tokens an answer has 16 tokens, as in vLLM and OpenAI's completions.
        use_tqdm: show progress on stderr (vLLM's name for it)
        """
        self._check_usable()
        compat_vllm.check_call("generate", other_arguments, _GENERATE, _SAMPLING)
        return self._answer(_prompts(prompts), sampling_params, use_tqdm, continues=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        **other_arguments: object,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template.

        Without max_tokens an answer may fill the rest of the context.
        add_generation_prompt: end the prompt where the assistant's turn begins
        chat_template_kwargs: more variables for the template, such as enable_thinking
        tools: functions that every conversation may call, in OpenAI's format; rendered like by the server.
            An answer's text is the model's output, including calls. tool_choice is available only in the server
        """
        compat_vllm.check_call("chat", other_arguments, _CHAT, _SAMPLING)
        if isinstance(messages, str):
            raise RequestError(
                "messages is a text", 'a list like [{"role": "user", "content": "a text"}]',
                "put the text into a message, or call generate()", param="messages",
            )  # fmt: skip
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Sequence[Message]] = messages if several else [messages]  # type: ignore[assignment, list-item]
        offered, extra = checked_tools(tools), chat_template_kwargs or {}
        prompts = [
            {"prompt_token_ids": self._chat_ids(c, offered, add_generation_prompt, extra)} for c in conversations
        ]
        return self._answer(prompts, sampling_params, use_tqdm, continues=False)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
        **other_arguments: object,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector per text, in order, from an encoder: `llm.embed(["a", "b"])[0].outputs.embedding`.

        A vector's bits depend only on its text.
        truncate_prompt_tokens: truncate longer texts to this many tokens in total, including special ones; -1 for the
            model's maximum. Without it a text that is too long is an error
        """
        self._check_usable()
        compat_vllm.check_call("embed", other_arguments, _EMBED, frozenset())
        if not isinstance(self._loop, EncoderLoop) or self._pairs:
            kind, can = ("cross-encoder", "score()") if self._pairs else ("language model", "generate() or chat()")
            raise RequestError(
                f"{self._opened.name} is a {kind}: it gives no vector for a text", can,
                "call these, or make an LLM of an encoder of sentences",
            )  # fmt: skip
        self._start(self._loop)
        with _in_python_words(self._given_as), _progress_bar(use_tqdm) as progress:
            each = _prompts(prompts)
            return embed(self._loop, self._opened.tokenizer, each, truncate_prompt_tokens, progress)

    @property
    def score(self) -> Callable[..., list[ScoringRequestOutput]]:
        """Score pairs of texts with a cross-encoder: `llm.score("a query", ["a text", "b"])[0].outputs.score`.

        A score's bits depend only on its pair.
        data_1: a text, or as many as in data_2; data_2: a text or a list
        truncate_prompt_tokens: as in embed(); the longer text of a pair is shortened first
        """
        if not self._pairs:
            raise AttributeError("score")  # __getattr__ says what to use instead
        self._check_usable()
        assert isinstance(self._loop, EncoderLoop)
        self._start(self._loop)
        scorer = Scorer(self._loop, self._opened.tokenizer, self._pairs)

        def score(
            data_1: str | Sequence[str], data_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None,
            use_tqdm: bool = False, **other_arguments: object,
        ) -> list[ScoringRequestOutput]:  # fmt: skip
            self._check_usable()
            compat_vllm.check_call("score", other_arguments, _SCORE, frozenset())
            with _in_python_words(self._given_as), _progress_bar(use_tqdm) as progress:
                return scorer.score(data_1, data_2, truncate_prompt_tokens, progress)

        return score

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Stream an answer: each item has all of it so far. Any number of streams may run concurrently.

        Without max_tokens an answer has 16 tokens.
        """
        self._check_usable()
        loop = self._generating
        with self._threading:  # from the first stream on, the engine has its own thread
            if not loop.thread.running:
                loop.start()
        with _in_python_words(self._given_as):
            async for output in astream(loop, prompt, sampling_params, continues=True):
                yield output

    def _answer(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool,
        *, continues: bool,
    ) -> list[RequestOutput]:  # fmt: skip
        with _in_python_words(self._given_as), _progress_bar(use_tqdm) as progress:
            return generate(self._generating, prompts, params, progress, continues=continues)

    def _start(self, loop: EncoderLoop) -> None:
        with self._threading:
            if not loop.thread.running:
                loop.start()

    @property
    def _pairs(self) -> PairTemplate | None:
        """How a cross-encoder's texts are joined; None for another model."""
        opened = self.__dict__.get("_opened")
        return opened.pairs if isinstance(opened, OpenedEncoder) else None

    def _check_usable(self) -> None:
        if os.getpid() != self._made_in:
            raise RequestError(
                "this LLM was made before the process was forked, and its threads are not in the child",
                "calls in the process that made it",
                'make an LLM in each process, or start processes with multiprocessing.get_context("spawn")',
            )
        if not self._released.alive:
            raise RequestError("this LLM is closed", "calls before close()", "make a new LLM")

    @property
    def _generating(self) -> EngineLoop:
        if isinstance(self._loop, EncoderLoop):
            can, what = ("score()", "a score for two texts") if self._pairs else ("embed()", "a vector for each text")
            raise RequestError(
                f"{self._opened.name} is an encoder: it gives {what}, and no next token", can,
                f"call {can}, or make an LLM of a model that generates text",
            )  # fmt: skip
        return self._loop

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an LLM cannot be pickled or copied: it is threads, mapped weights and a KV cache of this process",
            "the name of the model",
            "send the name, and make an LLM in the process that runs it",
        )

    def _chat_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> list[int]:  # fmt: skip
        self._check_usable()
        _ = self._generating  # report first that an encoder cannot chat
        template = self._opened.chat_template
        if template is None:
            raise CheckpointError(
                f"{self._opened.name} has no chat template", "a chat model", "use generate(), or a model tuned for chat"
            )
        prompts = PromptRenderer(template)
        text = prompts.render(normalised(messages), tools, add_generation_prompt=add_generation_prompt, extra=extra)
        return self._opened.tokenizer.encode(text, add_special_tokens=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer: `encode(text)` returns token ids, `decode(ids)` their text."""
        return self._opened.tokenizer

    def get_tokenizer(self) -> HfTokenizer:
        """Return the tokenizer with transformers' interface, like vLLM: `apply_chat_template`, `eos_token_id`, ..."""
        return HfTokenizer(self._opened.tokenizer, self._opened.chat_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the model's generation_config, which calls without SamplingParams use."""
        d = self._generating.defaults
        return SamplingParams(
            temperature=d.temperature, top_p=d.top_p, top_k=d.top_k, min_p=d.min_p,
            repetition_penalty=d.repetition_penalty,
        )  # fmt: skip

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; returns False while some of its KV pages are in use (vLLM's name)."""
        self._check_usable()
        return isinstance(self._loop, EncoderLoop) or self._loop.reset_prefix_cache()

    def __getattr__(self, name: str) -> Any:
        encoder = isinstance(self.__dict__.get("_loop"), EncoderLoop)
        can = "score()" if self._pairs else _CAN[encoder]
        raise compat_vllm.no_attribute(self, name, can, encoder=encoder)

    def __repr__(self) -> str:
        opened: RunningModel | None = self.__dict__.get("_opened")
        if opened is None:
            return "<LLM: not opened>"
        m, closed = opened.engine.manifest, "" if self._released.alive else ", closed"
        precision = m.precision.get("default", "?")
        return (
            f"<LLM {sanitize(opened.name)}: {precision}, {m.max_context} tokens, {m.max_sequences} at a time{closed}>"
        )

    def close(self) -> None:
        """Release the memory; also called at the end of a `with` block."""
        self._released()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
