"""POST /tokenize and /detokenize, in vLLM's shapes."""

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.errors import RequestError
from millrace.serve.fields import check_messages, decode
from millrace.serve.logprobs import token_text
from millrace.serve.protocol import DetokenizeRequest, TokenizeRequest
from millrace.serve.replies import DetokenizeReply, TokenizeReply
from millrace.serve.serving import Serving
from millrace.serve.wire import Call


async def tokenize(serving: Serving, call: Call, body: bytes) -> ASGIApp:
    """The token ids that a completion's prompt or a chat's messages would have. raises MillraceError"""
    asked = decode(body, TokenizeRequest)
    call.log.model = serving.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError(
            "a request needs either prompt or messages", "one of them", "send one of them", param="prompt"
        )
    if asked.prompt is not None:
        ids = await serving.texts.encode(asked.prompt, asked.add_special_tokens is not False)
    else:
        ids = await serving.texts.encode_chat(
            check_messages(asked.messages or []),
            asked.add_generation_prompt is not False,
            asked.chat_template_kwargs or {},
            bool(asked.add_special_tokens),
        )
    call.log.prompt_tokens = len(ids)
    reply = TokenizeReply(len(ids), serving.model.max_context, ids)
    if asked.return_token_strs:
        reply.token_strs = [token_text(serving.model.tokenizer, i) for i in ids]
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def detokenize(serving: Serving, call: Call, body: bytes) -> ASGIApp:
    """The text of these ids, special tokens included. raises MillraceError"""
    asked = decode(body, DetokenizeRequest)
    call.log.model = serving.check_model(asked.model)
    most, n_vocabulary = serving.model.max_context, serving.model.engine.limits.vocab_size
    if len(asked.tokens) > most:
        raise RequestError(
            f"tokens has {len(asked.tokens)} ids", f"at most {most}, this model's context", "send fewer", param="tokens"
        )
    for at, token in enumerate(asked.tokens):
        if not 0 <= token < n_vocabulary:
            raise RequestError(
                f"tokens[{at}] is {token}", f"a token id from 0 to {n_vocabulary - 1}", "correct tokens", param="tokens"
            )
    text = await serving.texts.decode(asked.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode(DetokenizeReply(text)), media_type="application/json")
