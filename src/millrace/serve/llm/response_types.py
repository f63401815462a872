"""Response structs that several protocols share: usage, log probabilities, embeddings, models, management.

UNSET leaves a key out; None writes null. Structs of a single protocol are in its folder.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response


def json_reply(reply: Struct, status: int = 200) -> Response:
    """Return a reply as JSON. Values of other types, such as paths in an engine's metadata, are written as text."""
    return Response(msgspec.json.encode(reply, enc_hook=str), status, media_type="application/json")


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorBody


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0  # found in the prefix cache
    audio_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0  # tokens of the reasoning
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class Receipt(Struct):
    """The origin of an answer, from which `millrace verify` can reproduce it. Digests are BLAKE2b of token ids."""

    path: str
    release: str
    engine: str  # its identity: weights, precision, kernels' declarations
    isa: str
    seed: int
    prompt: str
    answers: list[str]  # of each choice


class SeedEcho(Struct):
    """The seed that was drawn if the request set none; sending it reproduces the answer."""

    seed: int  # of the first prompt
    seeds: list[int] | UnsetType = UNSET  # one per prompt, if there are several
    receipt: Receipt | UnsetType = UNSET


# ------------------------------------------------------------------ answers


ChatFinish = Literal["stop", "length", "tool_calls"]


class TopLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, gc=False):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, gc=False):
    """One entry per token; `text_offset` counts characters of this choice's text, an echoed prompt included."""

    tokens: list[str]
    token_logprobs: list[float | None]  # nothing goes before an echoed prompt's first token
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


# ------------------------------------------------------------------ embeddings


class Embedding(Struct, gc=False):
    index: int
    embedding: list[float] | str  # base64: of little-endian float32
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Score(Struct, gc=False):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreReply(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RankedText(Struct, gc=False):
    text: str


class Ranked(Struct, gc=False, omit_defaults=True):
    """A document's relevance. index: its position in the request"""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankReply(Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]


# ------------------------------------------------------------------ models, management


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "millrace"
    parent: str | None = None
    default_sampling: dict[str, Any] | UnsetType = UNSET  # of requests that leave it out; as the model says
    default_sampling_of: str | UnsetType = UNSET  # whose defaults these are, if the model says none
    implementation: str | UnsetType = UNSET  # "transformers" if it does not run natively: it is slow


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class HealthReply(Struct):
    message: str
    status: Literal["live", "ready", "not_ready"]
    object: Literal["health.response"] = "health.response"


class LoadReply(Struct):
    """vLLM's load reply."""

    server_load: int  # requests that are being answered


class TokenizerInfoReply(Struct, omit_defaults=True):
    """vLLM's tokenizer reply, with the names of tokenizer_config.json."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None


class VersionReply(Struct):
    release: str
    api: str


class EngineVersionReply(Struct):
    version: str


class LicenseInfo(Struct):
    name: str


class ModelInfo(Struct):
    shortName: str  # noqa: N815  NIM's spelling
    modelUrl: str  # noqa: N815


class MetadataReply(Struct):
    """NIM's metadata, and under `millrace` all metadata of model and engine."""

    version: str
    modelInfo: list[ModelInfo]  # noqa: N815
    licenseInfo: LicenseInfo  # noqa: N815
    selectedModelProfileId: str  # noqa: N815  the engine's identity
    assetInfo: list[str]  # noqa: N815
    repository_override: str
    millrace: dict[str, Any]
