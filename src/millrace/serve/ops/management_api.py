"""GET endpoints: models, health, metrics, metadata, versions."""

import datetime
from collections.abc import Collection

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Scope

from millrace import __version__
from millrace.prometheus import CONTENT_TYPE
from millrace.runtime.settings import NATIVE
from millrace.serve.backend import Backend, Models
from millrace.serve.http.errors import HttpError
from millrace.serve.http.http_request import header
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.response_types import (
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
    json_reply,
)
from millrace.serve.ops.health import Health
from millrace.serve.protocols.anthropic.protocol import VERSION, AnthropicModel, AnthropicModels

API_VERSION = "1.0.0"
_VECTORS = "use /v1/embeddings"
_TEXT, _OTHER = "use /v1/completions", "use another server for these"
# Paths of other servers, including those below them, and what to use instead. The first match counts.
NOT_YET = {
    "/v1/assistants": "use /v1/responses", "/v1/threads": "use /v1/responses", "/v1/conversations": "use /v1/responses",
    "/embedding": _VECTORS,
    "/api": "models come with the server's start: of Ollama's paths there are chat, generate, embed, embeddings, tags, "
            "show, ps, version",
    "/completion": _TEXT, "/infill": _TEXT, "/v1/infill": _TEXT,
    "/props": "use /v1/metadata, or /tokenizer_info for the chat template", "/slots": "use /metrics, or /load",
    "/v1/moderations": _OTHER,
    "/v1/audio": _OTHER, "/v1/images": _OTHER, "/v1/files": _OTHER, "/v1/batches": _OTHER, "/v1/uploads": _OTHER,
    "/v1/fine_tuning": _OTHER, "/v1/vector_stores": _OTHER,
}  # fmt: skip
# Base URLs that people open in a browser.
_ROOTS = {
    "/v1": "this is the base URL: clients put /chat/completions behind it, and /v1/models tells what there is",
}


def model_list(models: Models, scope: Scope) -> Response:
    """Return the list of models in OpenAI's shape, or in Anthropic's for its clients."""
    if header(scope, VERSION) is not None:
        cards = [_anthropic(b, name) for b in models.backends for name in b.model.listed_names]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return json_reply(AnthropicModels(cards, first, last))
    return json_reply(ModelList([_card(b, name) for b in models.backends for name in b.model.listed_names]))


def model(models: Models, scope: Scope) -> Response:
    name: str = scope["path_params"]["model"]
    if header(scope, VERSION) is not None:
        return json_reply(_anthropic(models.get(name), name))
    return json_reply(_card(models.get(name), name))


def live(models: Models, scope: Scope) -> Response:
    """Report that the process answers, regardless of the engine."""
    return json_reply(HealthReply("live", "live"))


def ready(models: Models, scope: Scope) -> Response:
    """Return NIM's readiness: 200 if requests may be sent, otherwise 503 with the reason."""
    health: Health = models.heartbeat.ready()
    if health.ok:
        return json_reply(HealthReply(f"{', '.join(b.model.name for b in models.backends)} is ready", "ready"))
    return json_reply(HealthReply(health.message, "not_ready"), 503)


def health(models: Models, scope: Scope) -> Response:
    """Return vLLM's health: 200 without a body, or 503; it stays 200 while the server drains."""
    alive = models.heartbeat.alive()
    return Response(status_code=200) if alive.ok else Response(alive.message, 503, media_type="text/plain")


def load(models: Models, scope: Scope) -> Response:
    """Return vLLM's load: the number of requests that are being answered, without this one."""
    return json_reply(LoadReply(models.serving.load.n - 1))


def tokenizer_info(models: Models, scope: Scope) -> Response:
    """Return vLLM's tokenizer information, from which a client can render prompts itself."""
    able = models.of_kind(TextBackend)
    if not able:
        raise HttpError(
            404, "no_tokenizer", f"{models.first.model.name} is {models.first.kind_name}", "a language model",
            "ask a server that has one",
        )  # fmt: skip
    model = able[0].model
    tokenizer, template = model.tokenizer, model.chat_template
    return json_reply(
        TokenizerInfoReply(
            type(tokenizer).__name__,
            tokenizer.vocab_size,
            model.max_context,
            None if template is None else template.source,
            **tokenizer.special_token_strings,
        )
    )


def metrics(models: Models, scope: Scope) -> Response:
    return Response(models.serving.metrics.text(), headers={"content-type": CONTENT_TYPE})


def version(models: Models, scope: Scope) -> Response:
    return json_reply(VersionReply(__version__, API_VERSION))


def engine_version(models: Models, scope: Scope) -> Response:
    return json_reply(EngineVersionReply(__version__))


def metadata(models: Models, scope: Scope) -> Response:
    """Return NIM's metadata; it describes one model, so details are those of the first."""
    metadata_of_first = models.first.model.metadata
    reply = MetadataReply(
        version=__version__,
        modelInfo=[ModelInfo(b.model.name, str(b.model.metadata.get("source", ""))) for b in models.backends],
        licenseInfo=LicenseInfo(str(metadata_of_first.get("license", ""))),
        selectedModelProfileId=str(metadata_of_first.get("engine", "")),
        assetInfo=[],
        repository_override="",
        millrace=dict(metadata_of_first),
    )
    return json_reply(reply)


def not_found_error(path: str, paths: Collection[str]) -> HttpError:
    """Return the error of an unknown path. paths: those that exist"""
    plain = path.rstrip("/")
    what, expected, fix = f"there is nothing at {path}", "one of those listed at /docs", "correct the path"
    base = "end the base URL of the client with /v1, once"
    instead = next((fix for prefix, fix in NOT_YET.items() if f"{plain}/".startswith(f"{prefix}/")), None)
    if plain in paths:
        expected, fix = f'"{plain}"', "leave out the slash at its end"
    elif f"/v1{plain}" in paths:
        expected, fix = f'"/v1{plain}"', base
    elif plain.startswith("/v1/v1/") and plain.removeprefix("/v1") in paths:
        expected, fix = f'"{plain.removeprefix("/v1")}"', base
    elif plain in _ROOTS:
        fix = _ROOTS[plain]
    elif plain.endswith("/chat/completions"):  # a base URL with another path in it, or with this one already
        expected, fix = '"/v1/chat/completions"', base
    elif plain.endswith("/completions"):
        expected, fix = '"/v1/completions"', base
    elif instead is not None:
        what, fix = f"{path} is not served yet", instead
    return HttpError(404, "not_found", what, expected, fix)


def _anthropic(backend: Backend, name: str) -> AnthropicModel:
    created = datetime.datetime.fromtimestamp(backend.model.created, datetime.UTC)
    return AnthropicModel(name, backend.model.name, created.isoformat().replace("+00:00", "Z"))


def _card(backend: Backend, name: str) -> ModelCard:
    card = ModelCard(name, backend.model.created, backend.model.name, backend.model.max_context)
    if backend.defaults:
        card.default_sampling = dict(backend.defaults)
        card.default_sampling_of = backend.defaults_origin or UNSET
    implementation = backend.model.metadata.get("implementation", NATIVE)
    if implementation != NATIVE:
        card.implementation = str(implementation)
    return card
