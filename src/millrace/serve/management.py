"""GET endpoints: models, health, metrics, metadata, versions."""

from collections.abc import Collection

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from millrace import __version__
from millrace.serve.errors import HttpError
from millrace.serve.health import Health
from millrace.serve.metrics import CONTENT_TYPE
from millrace.serve.replies import (
    EngineVersionReply,
    HealthReply,
    LicenseInfo,
    LoadReply,
    MetadataReply,
    ModelCard,
    ModelInfo,
    ModelList,
    TokenizerInfoReply,
    VersionReply,
)
from millrace.serve.serving import Serving

API_VERSION = "1.0.0"
_CHAT, _TEXT, _OTHER = "use /v1/chat/completions", "use /v1/completions", "use another server for these"
# Paths that clients of other servers ask for, and what to use instead.
NOT_YET = {
    "/v1/responses": _CHAT, "/v1/messages": _CHAT, "/api/chat": _CHAT, "/api/generate": _TEXT, "/completion": _TEXT,
    "/api/tags": "use /v1/models", "/v1/embeddings": _OTHER, "/v1/rerank": _OTHER, "/v1/score": _OTHER,
    "/v1/audio/transcriptions": _OTHER, "/v1/images/generations": _OTHER,
}  # fmt: skip


def models(serving: Serving, scope: Scope) -> Response:
    return _json(ModelList([_card(serving, name) for name in serving.model.names]))


def model(serving: Serving, scope: Scope) -> Response:
    name: str = scope["path_params"]["model"]
    return _json(_card(serving, serving.check_model(name)))


def live(serving: Serving, scope: Scope) -> Response:
    """The process answers; nothing is said of the engine."""
    return _json(HealthReply("live", "live"))


def ready(serving: Serving, scope: Scope) -> Response:
    """NIM's: 200 when requests may be sent, 503 with the reason otherwise."""
    health: Health = serving.heartbeat.ready()
    if health.ok:
        return _json(HealthReply(f"{serving.model.name} is ready", "ready"))
    return _json(HealthReply(health.message, "not_ready"), 503)


def health(serving: Serving, scope: Scope) -> Response:
    """vLLM's: 200 without a body, or 503; stays 200 while running requests are finished."""
    alive = serving.heartbeat.alive()
    return Response(status_code=200) if alive.ok else Response(alive.message, 503, media_type="text/plain")


def load(serving: Serving, scope: Scope) -> Response:
    """vLLM's: how many requests are being answered, this one left out."""
    return _json(LoadReply(serving.load.n - 1))


def tokenizer_info(serving: Serving, scope: Scope) -> Response:
    """vLLM's: what a client needs to write a prompt by itself."""
    model, tokenizer = serving.model, serving.model.tokenizer
    template = model.chat_template
    return _json(
        TokenizerInfoReply(
            type(tokenizer).__name__,
            tokenizer.vocab_size,
            model.max_context,
            None if template is None else template.source,
            **tokenizer.special_token_strings,
        )
    )


def metrics(serving: Serving, scope: Scope) -> Response:
    return Response(serving.metrics.text(), headers={"content-type": CONTENT_TYPE})


def version(serving: Serving, scope: Scope) -> Response:
    return _json(VersionReply(__version__, API_VERSION))


def engine_version(serving: Serving, scope: Scope) -> Response:
    return _json(EngineVersionReply(__version__))


def metadata(serving: Serving, scope: Scope) -> Response:
    known = serving.model.metadata
    reply = MetadataReply(
        version=__version__,
        modelInfo=[ModelInfo(serving.model.name, str(known.get("source", "")))],
        licenseInfo=LicenseInfo(str(known.get("license", ""))),
        selectedModelProfileId=str(known.get("engine", "")),
        assetInfo=[],
        repository_override="",
        millrace=dict(known),
    )
    return Response(msgspec.json.encode(reply, enc_hook=str), media_type="application/json")


def unknown_path(path: str, known: Collection[str]) -> HttpError:
    """known: the paths that there are"""
    for wrong, right in (("", "/v1"), ("/v1/v1/", "/v1/")):  # a base URL without /v1, or with it twice
        if path.startswith(wrong) and (meant := right + path.removeprefix(wrong)) in known:
            return HttpError(
                404,
                "not_found",
                f"there is nothing at {path}",
                f'"{meant}"',
                "end the base URL of the client with /v1, once",
            )
    for end in ("/chat/completions", "/completions"):  # a client's base URL with the path in it already
        if path.endswith(end) and path != f"/v1{end}":
            return HttpError(
                404, "not_found", f"there is nothing at {path}", f'"/v1{end}"', "end the base URL with /v1"
            )
    listed = "one of those listed at /docs"
    if path.rstrip("/") in NOT_YET:
        return HttpError(404, "not_found", f"{path} is not served yet", listed, NOT_YET[path.rstrip("/")])
    return HttpError(404, "not_found", f"there is nothing at {path}", listed, "correct the path")


def _card(serving: Serving, name: str) -> ModelCard:
    model = serving.model
    return ModelCard(name, model.created, model.name, model.max_context)


def _json(reply: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(reply), status, media_type="application/json")
