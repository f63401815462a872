"""Good bodies of the server's endpoints, and the way that each goes before an engine is asked."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.runtime.encoder_loop import EncoderLimits, check_ids, truncate_ids, truncation
from millrace.runtime.request.sampling_params import resolve
from millrace.serve.http.http_request import RequestContext, RequestLog
from millrace.serve.http.server_context import ServerContext
from millrace.serve.llm.encoder_requests import EmbeddingRequest
from millrace.serve.llm.language_model import VERY_LONG_CHARACTERS
from millrace.serve.llm.request_decoding import chat_params, check_messages, completion_params, decode, texts_or_ids
from millrace.serve.llm.request_types import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from millrace.serve.protocols.openai.completions import _prompts
from millrace.serve.protocols.openai.tokens import detokenize, tokenize
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, tokenizer

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
BODIES: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatRequest, {**_SAMPLING, "messages": _MESSAGES, **_SHOWN}),
    (CompletionRequest, {**_SAMPLING, "prompt": "Once", "logprobs": 2, "best_of": 2}),
    (CompletionRequest, {**_SAMPLING, "prompt": [[1, 2, 3], [4]], "echo": True}),
    (CompletionRequest, {"model": "fake", "prompt": ["a", "b"]}),
    (EmbeddingRequest, {"input": ["a", "b"], "encoding_format": "base64", "user": "me", "dimensions": 8}),
    (EmbeddingRequest, {"input": [[1, 2], [3]], "truncate_prompt_tokens": -1, "add_special_tokens": False}),
    (TokenizeRequest, {"model": "fake", "messages": _MESSAGES, "add_generation_prompt": True}),
    (TokenizeRequest, {"model": "fake", "prompt": "Once", "return_token_strs": True}),
    (TokenizeRequest, {"prompt": "Once " * 200, "add_special_tokens": False}),
    (DetokenizeRequest, {"model": "fake", "tokens": [1, 2, 3]}),
    (DetokenizeRequest, {"tokens": [0, 699, 5] * 100}),
]  # fmt: skip

_ENCODER = EncoderLimits(inputs=(), max_step_tokens=64, max_texts=8, max_context=64, vocab_size=400, width=8)


class _First:
    """A tokenizer of the first characters: of more, a server's own processes take the time and memory."""

    def __init__(self, words: Tokenizer) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        return self._words.encode(text[:VERY_LONG_CHARACTERS], add_special_tokens)


class Endpoints:
    """The handlers of the endpoints over a model that is none: what would ask it stops before."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        fake = Fake(words=cast(Tokenizer, _First(tokenizer())))
        self._serving = fake.model().backend(ServerContext(ServerSettings()))

    def take(self, kind: type[Body], body: bytes) -> bytes | None:
        """What /tokenize and /detokenize answer; None elsewhere. raises MillraceError as the server would answer it"""
        asked = decode(body, kind)
        if isinstance(asked, TokenizeRequest):
            return self._answer(tokenize(self._serving, self._call(body), asked))
        if isinstance(asked, DetokenizeRequest):
            return self._answer(detokenize(self._serving, self._call(body), asked))
        limits = self._serving.model.engine.limits
        if isinstance(asked, ChatRequest):
            check_messages(asked.messages)
            resolve(chat_params(asked), GenerationDefaults(), limits, n_prompt=4)
        elif isinstance(asked, EmbeddingRequest):
            given, most = texts_or_ids(asked.input, "input"), truncation(asked.truncate_prompt_tokens, 64)
            for ids in given:
                check_ids(
                    truncate_ids([5] if isinstance(ids, str) else ids, most or 64, (1, 1)), _ENCODER, "x", "input"
                )
        elif isinstance(asked, CompletionRequest):
            params = completion_params(asked)
            _prompts(asked.prompt, params.n, params.max_tokens, self._serving)
            resolve(params, GenerationDefaults(), limits, n_prompt=4)
        return None

    def _answer(self, handler: Coroutine[Any, Any, ASGIApp]) -> bytes:
        reply = self._loop.run_until_complete(handler)
        assert isinstance(reply, Response)
        return bytes(reply.body)

    def _call(self, body: bytes) -> RequestContext:
        return RequestContext("fuzz", 0.0, RequestLog("POST", "/", "fuzz"), len(body))
