"""POST /api/embed and the older /api/embeddings: vectors of texts for Ollama's clients. source: docs/api.md"""

import time
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp

from millrace.runtime.encoder_loop import ALL
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_ITEMS
from millrace.serve.http.unknown_fields import ignored_names
from millrace.serve.llm.embeddings import FLOAT_BYTES, EmbeddingBackend, finish_reply, token_ids
from millrace.serve.llm.matryoshka import check_dimensions, normalise, shorten
from millrace.serve.llm.request_decoding import drop_large_fields
from millrace.serve.llm.request_types import Body, described
from millrace.serve.llm.unsupported_fields import IGNORED_OPTIONS, LLAMA_NOT_YET
from millrace.serve.protocols.ollama.protocol import without_latest

# Options of a model concern answers, memory and threads: none changes a vector.
_OPTIONS = frozenset([*IGNORED_OPTIONS, *LLAMA_NOT_YET, "temperature", "top_k", "top_p", "min_p", "seed", "stop"])


class _EmbedRequest(Body, kw_only=True):
    UNUSED: ClassVar = frozenset(["keep_alive"])
    WITHIN: ClassVar = ("options",)

    model: Annotated[str | None, described("one of /api/tags; may be left out")] = None
    options: Annotated[dict[str, Any] | None, described("no effect on vectors")] = None
    keep_alive: Annotated[float | str | None, described("no effect: the model stays loaded while the server runs")] = (
        None
    )

    def __post_init__(self) -> None:
        self.model = without_latest(self.model)

    def ignored_within(self) -> list[str]:
        options = {name: value for name, value in (self.options or {}).items() if name in _OPTIONS}
        unknown = ignored_names(self.options, _OPTIONS, "options", "options", useful=()) if self.options else []
        self.options = None
        return [*unknown, *(f"options.{name}" for name in options)]


class EmbedRequest(_EmbedRequest, kw_only=True):
    input: Annotated[str | list[str], described("a text or a list of texts")] = ""
    truncate: Annotated[bool | None, described("read only the beginning of a text that is too long", True)] = None
    dimensions: Annotated[int | None, described("length of the vectors, if the model has several", low=1)] = None


class EmbeddingsRequest(_EmbedRequest, kw_only=True):
    prompt: Annotated[str, described("a text")] = ""


class EmbedReply(Struct):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsReply(Struct):
    embedding: list[float]


async def embed(backend: EmbeddingBackend, call: RequestContext, request: EmbedRequest) -> ASGIApp:
    """Return a vector of length 1 for each text; without texts, report the model as loaded. raises MillraceError"""
    check_dimensions(request.dimensions, backend.limits.width, backend.model.matryoshka)
    texts = [request.input] if isinstance(request.input, str) else list(request.input)
    if not any(texts):
        return finish_reply(backend, call, msgspec.json.encode(EmbedReply(call.model, [], 0, 0, 0)))
    ids = await token_ids(backend, [*texts], "input", truncate=None if request.truncate is False else ALL)
    drop_large_fields(request)
    call.log.prompt_tokens = n_tokens = sum(map(len, ids))
    lease = backend.unsent.lease()
    try:
        lease.add(len(ids) * backend.limits.width * FLOAT_BYTES)
        vectors = await backend.vectors(ids)

        def encode_reply() -> bytes:
            own = normalise(shorten(vectors, request.dimensions)).tolist()
            took_ns = int((time.perf_counter() - call.arrived_s) * 1e9)
            return msgspec.json.encode(EmbedReply(call.model, own, took_ns, 0, n_tokens))

        content = await backend.off_loop(vectors.size > OFF_LOOP_ITEMS, encode_reply)
    finally:
        lease.release()
    return finish_reply(backend, call, content)


async def embeddings(backend: EmbeddingBackend, call: RequestContext, request: EmbeddingsRequest) -> ASGIApp:
    """Return the vector of one text, as the model computes it. raises MillraceError"""
    if not request.prompt:
        return finish_reply(backend, call, msgspec.json.encode(EmbeddingsReply([])))
    ids = await token_ids(backend, request.prompt, "prompt", truncate=ALL)
    drop_large_fields(request)
    call.log.prompt_tokens = len(ids[0])
    (vector,) = await backend.vectors(ids)
    return finish_reply(backend, call, msgspec.json.encode(EmbeddingsReply(vector.tolist())))
