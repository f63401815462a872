"""`LLM`: a model in this process, with the calls and results that users of vLLM and TensorRT-LLM know."""

import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from millrace.env import read_env
from millrace.errors import CheckpointError, ConfigError, RequestError, nearest
from millrace.runtime.generate import Prompt, astream, generate
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open import BuildSettings, Opened, RunSettings, find_engine, open_engine
from millrace.runtime.params import RequestOutput, SamplingParams

Message = Mapping[str, object]


def _split(given: Mapping[str, Any]) -> tuple[BuildSettings, RunSettings]:
    """raises ConfigError for a name that neither of them has"""
    build, run = ({f.name for f in fields(kind)} for kind in (BuildSettings, RunSettings))
    for name in given:
        if name not in build | run:
            raise ConfigError(f'LLM has no setting "{name}"', nearest(name, build | run), "correct the name")
    parts = ({name: v for name, v in given.items() if name in known} for known in (build, run))
    return BuildSettings(**next(parts)), RunSettings(**next(parts))


def _release(loop: EngineLoop, opened: Opened) -> None:
    """Ends the engine's thread, then gives the memory back."""
    if loop.in_own_thread:  # which cannot wait for itself: the collector may run anywhere
        threading.Thread(target=_release, args=(loop, opened)).start()
        return
    loop.stop()
    opened.close()


class LLM:
    """`LLM("tiny").generate(["Once upon a time"], SamplingParams(max_tokens=64))[0].outputs[0].text`.

    model: an engine or checkpoint folder, a GGUF file, a hub id (`org/name@revision`) or `tiny`; built when needed.
    precision: a name, or a map like {"default": "w4a8", "lm_head": "bf16"}.
    settings: those of `millrace build` and `serve` by the same names (head, kv_cache_dtype, group, max_context,
    max_batch, kv_memory, threads, isa).
    raises MillraceError, each with its mend
    """

    def __init__(self, model: str | Path, *, precision: str | Mapping[str, str] | None = None, **settings: Any) -> None:
        named, precisions = (precision, None) if not isinstance(precision, Mapping) else (None, precision)
        build, run = _split({"precision": named, **settings})
        name, engine = find_engine(str(model), build, read_env(), precisions=precisions)
        self._opened: Opened = open_engine(name, engine, run)
        self._loop = self._opened.loop(throughput=True)
        self._threading = threading.Lock()
        self._released = weakref.finalize(self, _release, self._loop, self._opened)  # also for who forgets close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """All prompts in one in-flight batch, answers in order. A prompt: text, or {"prompt_token_ids": [...]}."""
        self._check_open()
        if not isinstance(prompts, str | Mapping | Sequence):
            raise RequestError(
                f"prompts is of type {type(prompts).__name__}", "a prompt or a list of prompts", "pass one of these"
            )
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return generate(self._loop, [prompts] if single else prompts, sampling_params)  # type: ignore[list-item, arg-type]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """One conversation or several, through the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Sequence[Message]] = messages if several else [messages]  # type: ignore[assignment, list-item]
        return self.generate([{"prompt_token_ids": self._chat_ids(c)} for c in conversations], sampling_params)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The answer as it grows: each item holds all of it so far. Any number of them may run side by side."""
        self._check_open()
        with self._threading:  # from the first stream on, the engine has a thread of its own
            if not self._loop.running_in_thread:
                self._loop.start()
        async for output in astream(self._loop, prompt, sampling_params):
            yield output

    def _check_open(self) -> None:
        if not self._released.alive:
            raise RequestError("this LLM is closed", "calls before close()", "make a new LLM")

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        self._check_open()
        template = self._opened.chat_template
        if template is None:
            raise CheckpointError(
                f"{self._opened.name} has no chat template", "a chat model", "use generate(), or a model tuned for chat"
            )
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
                raise RequestError(
                    f"messages[{i}] is {str(message)[:100]}", 'like {"role": "user", "content": "a text"}',
                    "give each message a role and a text", param="messages",
                )  # fmt: skip
        return self._opened.tokenizer.encode(template.render(messages), add_special_tokens=False)

    @property
    def tokenizer(self) -> object:
        return self._opened.tokenizer

    def close(self) -> None:
        """Gives the memory back; also at the end of a `with`."""
        self._released()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
