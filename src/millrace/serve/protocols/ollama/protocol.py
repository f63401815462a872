"""Request and response structs of Ollama's protocol. source: Ollama's docs/api.md, 0.12"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from millrace.serve.http.unknown_fields import check_changing, check_neutral, ignored_names, meanings, unknown_field
from millrace.serve.llm.request_types import OPENAI_TOOLS, Body, TermsFields, described
from millrace.serve.llm.tools import FUNCTION, usable_tools
from millrace.serve.llm.unsupported_fields import (
    CHANGING,
    IGNORED,
    LLAMA_NOT_YET,
    PENALTIES,
    PENALTY_WINDOW,
    is_neutral,
)

# Ollama's name of a sampling parameter -> ours
OPTIONS: Mapping[str, str] = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repeat_last_n": "repeat_last_n",
}  # fmt: skip
# What Ollama samples with where neither request nor model says it. source: api/types.go, 2026-08 (no penalties since)
DEFAULTS: Mapping[str, object] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repeat_last_n": 64}
NAMES: Mapping[str, str] = {
    **{ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()},
    "response_format": "format", "chat_template_kwargs": "think",
}  # fmt: skip


def without_latest(model: str | None) -> str | None:
    """Return a model's name without the tag that clients append to every name."""
    return None if model is None else model.removesuffix(":latest")


def ignored_options(options: dict[str, Any] | None) -> list[str]:
    """Keep only sampling options, and return those that change nothing. raises RequestError for unsupported ones"""
    if not options:
        return []
    ignored = list[str]()
    penalises = any(
        options.get(name) not in (None, PENALTIES[ours]) for name, ours in OPTIONS.items() if ours in PENALTIES
    )
    for name, value in list(options.items()):
        if name in OPTIONS:
            continue
        if name in IGNORED or (name in PENALTY_WINDOW and not penalises):
            ignored += [f"options.{name}"] * (value is not None)
        elif name in LLAMA_NOT_YET:
            check_neutral(f"options.{name}", value, LLAMA_NOT_YET[name])
        else:
            continue
        del options[name]
    for name in [name for name in options if name not in OPTIONS]:
        for ours in meanings(name):
            if ours in NAMES and not is_neutral(options[name], CHANGING.get(ours, ())):
                raise unknown_field(f"options.{name}", f'did you mean "{NAMES[ours]}"?', param="options")
        check_changing(name, options[name], f"options.{name}")
    return ignored + ignored_names(options, OPTIONS, "options", "options")


class OllamaRequest(TermsFields, kw_only=True):
    NOT_YET: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "images": ([],), "suffix": ("",), "template": ("",), "context": ([],), "logprobs": (False,),
        "top_logprobs": (0,),
    }  # fmt: skip
    IGNORED_FIELDS: ClassVar = frozenset(["truncate", "shift"])
    UNUSED: ClassVar = frozenset(["keep_alive"])
    NAMES: ClassVar[Mapping[str, str]] = NAMES
    ANSWERS: ClassVar = True
    WITHIN: ClassVar[tuple[str, ...]] = ("options",)

    model: Annotated[str | None, described("one of /api/tags; may be left out")] = None
    options: Annotated[dict[str, Any] | None, described("num_predict, temperature, top_k, top_p, seed, stop, ...")] = (
        None
    )
    format: Annotated[str | dict[str, Any] | None, described('"json", or a JSON schema')] = None
    keep_alive: Annotated[float | str | None, described("no effect: the model stays loaded while the server runs")] = (
        None
    )
    think: Annotated[bool | str | None, described("for templates with enable_thinking")] = None
    stream: Annotated[bool | None, described("send lines of JSON instead of one answer", True)] = None

    def __post_init__(self) -> None:
        self.model = without_latest(self.model)

    def ignored_within(self) -> list[str]:
        return ignored_options(self.options)


class OllamaFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Struct, forbid_unknown_fields=True):
    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    name: str | None = None  # older clients' name of it
    tool_call_id: str | None = None
    images: list[Any] | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    WITHIN: ClassVar = ("tools", "options")

    messages: Annotated[list[OllamaMessage], described("the conversation so far")]
    tools: Annotated[list[dict[str, Any]] | None, described("functions that may be called")] = None

    def ignored_within(self) -> list[str]:
        self.tools, ignored = usable_tools(self.tools, OPENAI_TOOLS, ("type", "function"), FUNCTION)
        return ignored + ignored_options(self.options)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    NAMES: ClassVar = {**NAMES, "messages": "prompt"}

    prompt: Annotated[str, described("the user's message; with raw, the whole prompt")] = ""
    system: Annotated[str | None, described("system prompt")] = None
    raw: Annotated[bool | None, described("use the prompt without the chat template", False)] = None


class OutFunction(Struct):
    name: str
    arguments: dict[str, Any]


class OutCall(Struct):
    function: OutFunction
    id: str


class OutOllamaMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OutCall] | UnsetType = UNSET


class OllamaReply(Struct, kw_only=True):
    """A line of a stream, or a complete answer. Durations are nanoseconds; the last line has them and the counts."""

    model: str
    created_at: str
    message: OutOllamaMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaDetails(Struct):
    family: str
    families: list[str]
    quantization_level: str
    parent_model: str = ""
    format: str = "millrace"
    parameter_size: str = ""


class OllamaModel(Struct):
    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    size: int = 0


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaShowRequest(Body, kw_only=True):
    IGNORED_FIELDS: ClassVar = frozenset(["verbose", "system", "template", "options"])

    model: Annotated[str | None, described("one of /api/tags")] = None
    name: Annotated[str | None, described("older clients' name of model")] = None

    def __post_init__(self) -> None:
        self.model = without_latest(self.model or self.name)


class OllamaShowReply(Struct):
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str
    modified_at: str
    parameters: str = ""
    license: str = ""
    modelfile: str = ""


class OllamaVersion(Struct):
    version: str


class OllamaError(Struct):
    error: str
