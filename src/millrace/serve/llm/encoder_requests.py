"""Request bodies of the encoder endpoints: embeddings, score, rerank."""

from typing import Annotated, ClassVar

from msgspec import Struct

from millrace.serve.llm.request_types import Body, described
from millrace.serve.llm.unsupported_fields import EMBEDDING_NOT_YET, HARMLESS, IGNORED, NEARNESS_NOT_YET


class EmbeddingRequest(Body, kw_only=True):
    NOT_YET: ClassVar = EMBEDDING_NOT_YET
    IGNORED_FIELDS: ClassVar = HARMLESS | IGNORED

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    input: Annotated[
        str | list[str | int | list[int]],
        described(
            "a text, token ids, or a list of texts or of token-id lists. Ids are the model's own: LangChain sends "
            "those of another tokenizer unless check_embedding_ctx_length is False"
        ),
    ]
    encoding_format: Annotated[
        str | None, described('"float", or "base64" of the little-endian float32 of each vector', "float")
    ] = None
    dimensions: Annotated[int | None, described("length of the vectors, if the model has several", low=1)] = None
    truncate_prompt_tokens: Annotated[
        int | None, described("truncate longer texts to this many tokens; -1: the model's maximum", low=-1)
    ] = None
    add_special_tokens: Annotated[
        bool | None, described("add special tokens such as [CLS] and [SEP] around a text", True)
    ] = None


class ScoreRequest(Body, kw_only=True):
    NOT_YET: ClassVar = NEARNESS_NOT_YET
    IGNORED_FIELDS: ClassVar = HARMLESS | IGNORED

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    text_1: Annotated[
        str | list[str],
        described("one text, compared with each of text_2, or as many texts as text_2, compared pairwise"),
    ]
    text_2: Annotated[str | list[str], described("a text or a list of texts")]
    truncate_prompt_tokens: Annotated[
        int | None, described("truncate longer texts to this many tokens; -1: the model's maximum", low=-1)
    ] = None


class Document(Struct, forbid_unknown_fields=True, gc=False):
    text: str


class RerankRequest(Body, kw_only=True):
    NOT_YET: ClassVar = NEARNESS_NOT_YET
    IGNORED_FIELDS: ClassVar = (HARMLESS | IGNORED) - {"top_n"}

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    query: Annotated[str, described("a text")]
    documents: Annotated[list[str | Document], described('texts, or objects {"text": ...}')]
    top_n: Annotated[int | None, described("maximum number of documents to return, best first; 0: all", 0, low=0)] = (
        None
    )
    return_documents: Annotated[bool | None, described("include the documents' texts", True)] = None
    truncate_prompt_tokens: Annotated[
        int | None, described("truncate longer texts to this many tokens; -1: the model's maximum", low=-1)
    ] = None
