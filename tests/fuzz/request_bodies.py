"""Good bodies of the server's endpoints, and the way that each goes before an engine is asked."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from millrace.checkpoint.generation import GenerationDefaults
from millrace.engine.executor import ExecutorLimits
from millrace.runtime.resolve import resolve
from millrace.runtime.service import ServiceOptions
from millrace.serve.completions import _prompts
from millrace.serve.fields import check_messages, decode
from millrace.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from millrace.serve.sampling import chat_params, completion_params
from millrace.serve.serving import Serving

_SAMPLING: dict[str, Any] = {
    "model": "fake", "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "n": 2, "seed": 7,
    "stop": ["\n\n", "END"], "stop_token_ids": [3, 4], "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1.5, "6": -100}, "ignore_eos": True, "min_tokens": 1, "user": "me",
    "skip_special_tokens": False, "include_stop_str_in_output": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "a"}, {"role": "user", "content": "Who?"},
]  # fmt: skip
_SHOWN: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "chat_template_kwargs": {"a": 1}}
BODIES: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (ChatRequest, {**_SAMPLING, "messages": _MESSAGES, **_SHOWN}),
    (CompletionRequest, {**_SAMPLING, "prompt": "Once", "logprobs": 2, "best_of": 2}),
    (CompletionRequest, {**_SAMPLING, "prompt": [[1, 2, 3], [4]], "echo": True}),
    (CompletionRequest, {"model": "fake", "prompt": ["a", "b"]}),
    (TokenizeRequest, {"model": "fake", "messages": _MESSAGES, "add_generation_prompt": True}),
    (TokenizeRequest, {"model": "fake", "prompt": "Once", "return_token_strs": True}),
    (DetokenizeRequest, {"model": "fake", "tokens": [1, 2, 3]}),
]  # fmt: skip
_LIMITS = ExecutorLimits(
    max_step_tokens=64, max_sequences=8, max_context=512, page_tokens=64, n_pages=64, vocab_size=700
)
# as much of a server as the checks of a body look at
_ENGINE = SimpleNamespace(limits=_LIMITS, options=ServiceOptions())
_SERVING = cast(Serving, SimpleNamespace(model=SimpleNamespace(engine=_ENGINE, max_context=_LIMITS.max_context)))


def check(kind: type[msgspec.Struct], body: bytes) -> None:
    """raises MillraceError as the server would answer it"""
    asked = decode(body, kind)
    if isinstance(asked, ChatRequest | TokenizeRequest) and asked.messages is not None:
        check_messages(asked.messages)
    if isinstance(asked, CompletionRequest):
        _prompts(asked.prompt, completion_params(asked), _SERVING)
    if isinstance(asked, ChatRequest):
        resolve(chat_params(asked), GenerationDefaults(), _LIMITS, n_prompt=4)
    elif isinstance(asked, CompletionRequest):
        resolve(completion_params(asked), GenerationDefaults(), _LIMITS, n_prompt=4)
