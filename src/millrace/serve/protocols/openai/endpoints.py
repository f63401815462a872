"""Table of the endpoints of OpenAI's protocol, with vLLM's and NIM's additions."""

from collections.abc import Mapping

from millrace.serve.http.errors import HttpProblem
from millrace.serve.http.openapi import Operation
from millrace.serve.http.routes import GetHandler, HttpEndpoint, PostHandler, Protocol, get
from millrace.serve.llm.embeddings import EmbeddingBackend, EncoderBackend, embeddings
from millrace.serve.llm.encoder_requests import EmbeddingRequest, RerankRequest, ScoreRequest
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.request_types import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from millrace.serve.llm.response_types import (
    EmbeddingReply,
    EngineVersionReply,
    HealthReply,
    LoadReply,
    MetadataReply,
    ModelCard,
    ModelList,
    RerankReply,
    ScoreReply,
    TokenizerInfoReply,
    VersionReply,
)
from millrace.serve.ops import management_api, request_trace, step_timeline
from millrace.serve.protocols.openai.chat import chat_completions
from millrace.serve.protocols.openai.completions import completions
from millrace.serve.protocols.openai.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    TokenizeReply,
)
from millrace.serve.protocols.openai.rerank import rerank, score
from millrace.serve.protocols.openai.tokens import detokenize, tokenize
from millrace.serve.protocols.responses import endpoints as responses
from millrace.serve.protocols.responses.protocol import DeletedReply, ResponseEvent, ResponseReply, ResponsesRequest

_EXAMPLES: Mapping[type[Body], Mapping[str, object]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
    CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 64},
    EmbeddingRequest: {"input": ["The river runs past a mill.", "The wheel turns."]},
    ScoreRequest: {"text_1": "a mill", "text_2": ["The river runs past a mill.", "The wheel turns."]},
    RerankRequest: {"query": "a mill", "documents": ["The river runs past a mill.", "The wheel turns."], "top_n": 1},
    ResponsesRequest: {"input": "Tell me a story.", "max_output_tokens": 64},
    TokenizeRequest: {"prompt": "Once upon a time", "return_token_strs": True},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
}


def _text(
    path: str,
    handler: PostHandler,
    summary: str,
    request: type[Body],
    reply: type,
    event: type | None = None,
) -> HttpEndpoint:
    """Return an endpoint of language models."""
    operation = Operation("POST", path, summary, True, request, reply, event, example=_EXAMPLES[request])
    return HttpEndpoint(operation, handler, TextBackend, names=request.NAMES)


def _stored_response(method: str, path: str, handler: GetHandler, summary: str, reply: type) -> HttpEndpoint:
    """Return an endpoint of stored responses; requests have nothing but an id."""
    return HttpEndpoint(Operation(method, path, summary, True, None, reply), get_handler=handler)


def _encoder(
    path: str, handler: PostHandler, summary: str, request: type[Body], reply: type,
    kind: type[EncoderBackend] = EncoderBackend,
) -> HttpEndpoint:  # fmt: skip
    """Return an endpoint of text encoders. kind: the encoders that have it"""
    operation = Operation("POST", path, summary, True, request, reply, example=_EXAMPLES[request])
    return HttpEndpoint(operation, handler, kind)


# Protected: whatever costs time or says which model this is. Health, metrics and versions stay open, as in vLLM, for
# load balancers and Prometheus.
_MAIN: tuple[HttpEndpoint, ...] = (
    _text("/v1/chat/completions", chat_completions, "Answer a conversation", ChatRequest, ChatReply, ChatChunk),
    _text("/v1/completions", completions, "Continue a text", CompletionRequest, CompletionReply, CompletionReply),
    _text(
        "/v1/responses",
        responses.create,
        "Answer a conversation, in OpenAI's newer protocol",
        ResponsesRequest,
        ResponseReply,
        ResponseEvent,
    ),
    get("/v1/responses/{response_id}", responses.retrieve, "A stored response", ResponseReply, protected=True),
    _stored_response("DELETE", "/v1/responses/{response_id}", responses.delete, "Forget a response", DeletedReply),
    _stored_response("POST", "/v1/responses/{response_id}/cancel", responses.cancel, "End a response", ResponseReply),
    _encoder(
        "/v1/embeddings", embeddings, "A vector for each text", EmbeddingRequest, EmbeddingReply, EmbeddingBackend
    ),
    _encoder(
        "/v1/score",
        score,
        "Scores of texts: a cross-encoder's, or the cosine of vectors",
        ScoreRequest,
        ScoreReply,
    ),
    _encoder("/v1/rerank", rerank, "Documents by how near they are to a query", RerankRequest, RerankReply),
    _text("/tokenize", tokenize, "Text or messages to token ids", TokenizeRequest, TokenizeReply),
    _text("/detokenize", detokenize, "Token ids to text", DetokenizeRequest, DetokenizeReply),
    get("/tokenizer_info", management_api.tokenizer_info, "Special tokens and template", TokenizerInfoReply, True),
    get("/v1/models", management_api.model_list, "The model and its aliases", ModelList, protected=True),
    get("/v1/models/{model}", management_api.model, "One model", ModelCard, protected=True),
    get(
        "/v1/requests/{request_id}/trace",
        request_trace.request_trace,
        "What happened to a request",
        request_trace.TraceList,
        True,
    ),
    get("/timeline", step_timeline.timeline, "A page of the last steps, and who was in them", None, True),
    get(
        "/timeline.json",
        step_timeline.steps,
        "The last steps as data: what each computed, and its time",
        step_timeline.StepList,
        True,
    ),
    get("/v1/metadata", management_api.metadata, "Model, engine and licence", MetadataReply, protected=True),
    get("/v1/health/live", management_api.live, "Does the process answer?", HealthReply),
    get("/v1/health/ready", management_api.ready, "May requests be sent? 503: not now", HealthReply),
    get("/health", management_api.health, "Does the engine work? 503: no", None),
    get("/load", management_api.load, "Requests that are being answered", LoadReply),
    get("/v1/metrics", management_api.metrics, "Prometheus metrics", None),
    get("/v1/version", management_api.version, "Release and API version", VersionReply),
    get("/version", management_api.engine_version, "Release, in vLLM's shape", EngineVersionReply),
)
# the same under another path, as other servers have it
_ALIASES: tuple[tuple[str, str, str], ...] = (
    ("POST", "/v1/tokenize", "/tokenize"),
    ("POST", "/v1/detokenize", "/detokenize"),
    ("POST", "/score", "/v1/score"),
    ("POST", "/rerank", "/v1/rerank"),
    ("POST", "/v2/rerank", "/v1/rerank"),
    ("GET", "/ping", "/health"),
    ("POST", "/ping", "/health"),
    ("GET", "/metrics", "/v1/metrics"),
)


def _aliases() -> tuple[HttpEndpoint, ...]:
    by_path = {endpoint.path: endpoint for endpoint in _MAIN}
    return tuple(by_path[same_as].alias(method, path) for method, path, same_as in _ALIASES)


OPENAI = Protocol((*_MAIN, *_aliases()), HttpProblem.body)
