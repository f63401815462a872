"""POST /tokenize and /detokenize, in vLLM's shapes."""

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.errors import RequestError
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_ITEMS
from millrace.serve.llm.conversation import rendering_of
from millrace.serve.llm.generation_stream import ignore_thinking
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.request_types import DetokenizeRequest, TokenizeRequest
from millrace.serve.llm.tools import tools_of
from millrace.serve.protocols.openai.replies import DetokenizeReply, TokenizeReply

_PIECE = 1 << 15  # tokens whose JSON is written at once: some milliseconds


async def tokenize(backend: TextBackend, call: RequestContext, request: TokenizeRequest) -> ASGIApp:
    """Return the token ids of a completion's prompt or a chat's messages. raises MillraceError

    A text may be longer than the context, so that clients can cut it into pieces.
    """
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(
            "a request needs either prompt or messages", "one of them", "send one of them", param="prompt"
        )
    if request.prompt is not None:
        ids = (await backend.texts.encode([request.prompt], request.add_special_tokens is not False))[0]
    else:
        tools = tools_of(request.tools, None, None)
        ids = await backend.texts.encode_chat(
            request.messages or [], rendering_of(request), tools=tools.specs if tools else (),
            body_bytes=call.body_bytes, bounded=False,
        )  # fmt: skip
    ignore_thinking(backend, call, request)
    call.log.prompt_tokens = len(ids)

    def reply() -> bytes:
        tokens_reply = TokenizeReply(len(ids), backend.model.max_context, cast(list[int], _encode_values(ids, list)))
        if request.return_token_strs:
            text = backend.model.tokenizer.token_text
            tokens_reply.token_strs = cast(list[str], _encode_values(ids, lambda part: [text(i) for i in part]))
        return msgspec.json.encode(tokens_reply)

    return Response(await backend.off_loop(len(ids) > OFF_LOOP_ITEMS, reply), media_type="application/json")


def _encode_values(ids: Sequence[int], values: Callable[[Sequence[int]], Sequence[int | str]]) -> msgspec.Raw:
    """Return the JSON list of a value for each token, in pieces: each call holds the interpreter lock until it ends."""
    pieces = (msgspec.json.encode(values(ids[at : at + _PIECE]))[1:-1] for at in range(0, len(ids), _PIECE))
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


async def detokenize(backend: TextBackend, call: RequestContext, request: DetokenizeRequest) -> ASGIApp:
    """Return the text of token ids, special tokens included. raises MillraceError"""
    max_tokens, n_vocabulary = backend.model.max_context, backend.model.engine.limits.vocab_size
    if len(request.tokens) > max_tokens:
        raise RequestError(
            f"tokens has {len(request.tokens)} ids",
            f"at most {max_tokens}, this model's context",
            "send fewer",
            param="tokens",
        )
    for at, token in enumerate(request.tokens):
        if not 0 <= token < n_vocabulary:
            raise RequestError(
                f"tokens[{at}] is {token}", f"a token id from 0 to {n_vocabulary - 1}", "correct tokens", param="tokens"
            )
    text = await backend.texts.decode(request.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode(DetokenizeReply(text)), media_type="application/json")
