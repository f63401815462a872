"""POST /v1/score and /v1/rerank: similarity of texts, by a cross-encoder's score or the cosine of their vectors.

As in vLLM: a cross-encoder reads both texts at once, an embedding model encodes each text by itself.
"""

import time

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.types import ASGIApp

from millrace.errors import RequestError
from millrace.runtime.encoder_loop import Vectors
from millrace.runtime.text_pairs import check_counts, join_texts
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_ITEMS
from millrace.serve.llm.embeddings import (
    FLOAT_BYTES,
    CrossEncoderBackend,
    EncoderBackend,
    check_number,
    finish_reply,
    token_ids,
)
from millrace.serve.llm.encoder_requests import RerankRequest, ScoreRequest
from millrace.serve.llm.request_decoding import drop_large_fields, texts_or_ids
from millrace.serve.llm.response_types import EmbeddingUsage, Ranked, RankedText, RerankReply, Score, ScoreReply

_ROW_BYTES = 3 * FLOAT_BYTES  # of a score with its JSON keys, at most


async def score(backend: EncoderBackend, call: RequestContext, request: ScoreRequest) -> ASGIApp:
    """Score one text against each of the others, or pairs of texts. raises MillraceError"""
    first, second = (list(t) if isinstance(t, list) else [t] for t in (request.text_1, request.text_2))
    drop_large_fields(request)
    check_counts(len(first), len(second), ("text_1", "text_2"))
    scores, n_tokens = await _scores(
        backend, call, ("text_1", first), ("text_2", second), request.truncate_prompt_tokens
    )
    reply = ScoreReply(
        f"score-{call.id}", int(time.time()), call.model, [Score(i, s) for i, s in enumerate(scores.tolist())],
        EmbeddingUsage(n_tokens, n_tokens),
    )  # fmt: skip
    return finish_reply(backend, call, msgspec.json.encode(reply))


async def rerank(backend: EncoderBackend, call: RequestContext, request: RerankRequest) -> ASGIApp:
    """Return documents by similarity to the query, the most similar first. raises MillraceError"""
    if request.top_n is not None and request.top_n < 0:
        raise RequestError(f"top_n is {request.top_n}", "at least 0, which is all", "correct it", "top_n")
    texts = [d if isinstance(d, str) else d.text for d in request.documents]
    scores, n_tokens = await _scores(
        backend, call, ("query", [request.query]), ("documents", texts), request.truncate_prompt_tokens
    )
    order = np.argsort(-scores, kind="stable")[: request.top_n or None].tolist()
    shown = request.return_documents is not False
    lease = backend.unsent.lease()
    try:
        lease.add(sum(len(texts[i].encode(errors="surrogatepass")) for i in order) if shown else 0)
        results = [Ranked(i, float(scores[i]), RankedText(texts[i]) if shown else None) for i in order]
        reply = RerankReply(f"rerank-{call.id}", call.model, EmbeddingUsage(n_tokens, n_tokens), results)
        content = await backend.off_loop(call.body_bytes > OFF_LOOP_ITEMS, lambda: msgspec.json.encode(reply))
    finally:
        lease.release()
    return finish_reply(backend, call, content)


Field = tuple[str, list[str]]  # name and texts of a field of the request
Scores = tuple[NDArray[np.float64], int]  # of each text of the second field, and the number of tokens of all


async def _scores(
    backend: EncoderBackend, call: RequestContext, first: Field, second: Field, truncate: int | None
) -> Scores:
    """Score each text of `second` with its text of `first`."""
    scored = _read_together if isinstance(backend, CrossEncoderBackend) else _cosines
    return await scored(backend, call, first, second, truncate)  # type: ignore[arg-type]  # of this kind


async def _read_together(
    backend: CrossEncoderBackend, call: RequestContext, first: Field, second: Field, truncate: int | None
) -> Scores:
    """Return a cross-encoder's scores."""
    parts = []
    for name, texts in (first, second):
        check_number(len(texts_or_ids([*texts], name)), name)
        parts.append(await backend.texts.encode(texts, False))
    limits, n_tokens = backend.limits, sum(len(ids) for ids in parts[1]) + len(parts[1]) * max(map(len, parts[0]))
    sequences, n_first = await backend.off_loop(
        n_tokens > OFF_LOOP_ITEMS, lambda: join_texts(backend.pairs, parts[0], parts[1], limits, truncate, second[0])
    )
    call.log.prompt_tokens = n_tokens = sum(map(len, sequences))
    lease = backend.unsent.lease()
    try:
        lease.add(len(sequences) * _ROW_BYTES)
        vectors = await backend.vectors(sequences, n_first)
        return vectors[:, 0].astype(np.float64), n_tokens
    finally:
        lease.release()


async def _cosines(
    backend: EncoderBackend, call: RequestContext, first: Field, second: Field, truncate: int | None
) -> Scores:
    """Return the cosines of the texts' vectors."""
    parts = [await token_ids(backend, [*texts], field, truncate=truncate) for field, texts in (first, second)]
    call.log.prompt_tokens = n_tokens = sum(len(ids) for part in parts for ids in part)
    lease = backend.unsent.lease()
    try:
        lease.add(sum(map(len, parts)) * (backend.limits.width * 4 + _ROW_BYTES))
        vectors = await backend.vectors([*parts[0], *parts[1]])
        return await backend.off_loop(vectors.size > OFF_LOOP_ITEMS, lambda: cosines(vectors, len(parts[0]))), n_tokens
    finally:
        lease.release()


def cosines(vectors: Vectors, first: int) -> NDArray[np.float64]:
    """Return cosines of the `first` vectors (one, or as many as the rest) with the rest; 0 if a vector is zero."""
    exact = vectors.astype(np.float64)
    a, b = exact[:first], exact[first:]
    length = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    similarities: NDArray[np.float64] = (a * b).sum(axis=1) / np.where(length, length, 1.0)
    return similarities
