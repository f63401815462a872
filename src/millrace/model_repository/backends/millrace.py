"""`millrace`: a language model of ours in a model repository, asked with the tensors that TensorRT-LLM's models have.

The version's folder is a checkpoint or an engine, or holds one, or a GGUF file; or the parameter `model` is the name of
a bundled or built one. Requests of all clients share the engine's steps, so that one instance is all there is.
Decoupled, a request with `stream` is answered with what each step adds, any other once; answers are those of
`/v1/completions` with the same numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.api.offline_generate import prompt_tokens
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.compile.resolve_model import find_engine, model_folder
from millrace.compile.settings import BuildSettings
from millrace.env import read_env
from millrace.errors import MillraceError, nearest
from millrace.model_repository.backends import encoder
from millrace.model_repository.backends.backend import Instance, InstanceContext, ModelBackend
from millrace.model_repository.backends.encoder import Encoder
from millrace.model_repository.backends.text_backend import EngineInstance, begin_each, texts_of
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array, objects
from millrace.runtime.open_engine import OpenedEncoder, RunningModel, open_any
from millrace.runtime.request.request import Request
from millrace.runtime.request.sampling_params import COMPLETION_TOKENS, Delta, FinishReason, SamplingParams
from millrace.runtime.settings import RunSettings
from millrace.settings import Settings, parse_size, plain_type
from millrace.tune.accuracy_pricing import pricing

TEXT, OUT = "text_input", "text_output"
_CHECKPOINT = ("config.json", "manifest.json")
# Of what may be asked, by TensorRT-LLM's names: the data type, whether there may be several, and ours.
_SAMPLING: Mapping[str, tuple[str, str]] = {
    "max_tokens": ("INT32", "max_tokens"), "min_length": ("INT32", "min_tokens"), "min_tokens": ("INT32", "min_tokens"),
    "temperature": ("FP32", "temperature"), "top_k": ("INT32", "top_k"), "top_p": ("FP32", "top_p"),
    "min_p": ("FP32", "min_p"), "repetition_penalty": ("FP32", "repetition_penalty"),
    "presence_penalty": ("FP32", "presence_penalty"), "frequency_penalty": ("FP32", "frequency_penalty"),
    "random_seed": ("UINT64", "seed"), "seed": ("UINT64", "seed"), "ignore_eos": ("BOOL", "ignore_eos"),
}  # fmt: skip
# What asks for what happens anyway; another value is refused.
_ONLY: Mapping[str, tuple[str, Sequence[float]]] = {
    "beam_width": ("INT32", (0, 1)), "num_return_sequences": ("INT32", (0, 1)), "length_penalty": ("FP32", (0, 1)),
    "return_context_logits": ("BOOL", (0,)), "return_generation_logits": ("BOOL", (0,)),
    # vLLM's
    "exclude_input_in_output": ("BOOL", (1,)), "return_num_input_tokens": ("BOOL", (0,)),
    "return_num_output_tokens": ("BOOL", (0,)), "return_finish_reason": ("BOOL", (0, 1)),
}  # fmt: skip
_WITH_LOGPROBS = ("return_log_probs", "return_cumulative_logprob", "return_logprobs")
_OTHERS = {
    **dict.fromkeys(_WITH_LOGPROBS, "BOOL"), "stream": "BOOL", "sampling_parameters": "STRING", "stop_words": "STRING",
    "bad_words": "STRING", "end_id": "INT32", "pad_id": "INT32",
}  # fmt: skip
_SEVERAL = ("stop_words", "bad_words")
_LOGPROBS = frozenset({"cum_log_probs", "output_log_probs"})  # where they are asked for
_OUTPUTS = {OUT: "STRING", "cum_log_probs": "FP32", "output_log_probs": "FP32", "finish_reason": "STRING"}


class EngineBackend(ModelBackend):
    """Of language models, and of encoders of texts (`encoder.py`): which of them it is, the files say."""

    def instance(self, given: InstanceContext) -> Instance:
        config = given.config
        if sum(group.count for group in config.instance_group) != 1:
            raise invalid(
                f"model '{config.name}' must have one instance: it computes the requests of all clients together"
            )
        if not _is_encoder(config, given.folder):
            for name in (o.name for o in config.output):
                if name not in _OUTPUTS:
                    raise invalid(f"unexpected inference output '{name}', allowed outputs are: {', '.join(_OUTPUTS)}")
        try:
            opened = _opened(given)
            return _LanguageModel(given, opened) if isinstance(opened, RunningModel) else Encoder(given, opened)
        except MillraceError as error:
            raise _as_status(error) from error

    def completed(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """Of an encoder texts and vectors. Of a language model every input that it takes, all optional but the text;
        it streams, unless the policy says otherwise. raises StatusError"""
        if _is_encoder(config, folder):
            return encoder.completed(config)
        if config.model_transaction_policy is None:
            policy = replace(empty(TransactionPolicy), decoupled=True)
            config = replace(config, model_transaction_policy=policy)
        kinds = {**{k: kind for k, (kind, _) in (*_SAMPLING.items(), *_ONLY.items())}, **_OTHERS}
        return replace(
            config,
            input=config.input or (_tensor(empty(ModelInput), TEXT, "STRING"), *(
                replace(_tensor(empty(ModelInput), name, kind, name in _SEVERAL), optional=True)
                for name, kind in kinds.items()
            )),
            output=config.output or tuple(
                _tensor(empty(ModelOutput), name, kind, name == "output_log_probs") for name, kind in _OUTPUTS.items()
            ),
        )  # fmt: skip


def _tensor(nothing: Any, name: str, kind: str, several: bool = False) -> Any:
    return replace(nothing, name=name, data_type=DataType[f"TYPE_{kind}"], dims=(-1 if several else 1,))


class _LanguageModel(EngineInstance):
    def __init__(self, given: InstanceContext, opened: RunningModel) -> None:
        """Closes `opened`, in the end."""
        config = given.config
        self._streams = bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)
        self._outputs, self._opened = [o.name for o in config.output], opened
        self._running: dict[InferRequest, Request] = {}
        self._loop = self._opened.loop()
        super().__init__(self._loop.thread)
        self._loop.start(self._look)

    def execute(self, requests: Sequence[InferRequest]) -> None:
        begin_each(requests, self._begin)

    def _begin(self, request: InferRequest) -> None:
        """raises StatusError, RequestError, BusyError"""
        text = texts_of(request, TEXT)
        if len(text) != 1:
            raise invalid(f"{request.named}{TEXT} has {len(text)} texts, and one a request is expected")
        params, streams = sampling(request)
        if streams and not self._streams:
            raise invalid(f"{request.named}stream is asked of a model without the decoupled transaction policy")
        _, ids = prompt_tokens(self._opened.tokenizer, text[0])
        wanted = request.outputs or [n for n in self._outputs if n not in _LOGPROBS or params.logprobs is not None]
        answer = _Answer(request, wanted, streams, self._running)
        asked = self._loop.submit(ids, params, answer.deliver, request.id or None)
        if request.bill is not None:
            request.bill.add(prompt=len(ids))
        self._running[request] = asked
        if answer.has_ended:  # the engine's thread was quicker
            self._running.pop(request, None)
        if request.cancelled:
            self._loop.cancel(asked)

    def cancelled(self, request: InferRequest) -> None:
        if (asked := self._running.get(request)) is not None:
            self._loop.cancel(asked)

    def close(self) -> None:
        self._loop.stop()
        self._opened.close()


class _Answer:
    """What becomes of one request; of the engine's thread.

    outputs: those that it gets; running: where it stands until it has ended
    """

    def __init__(
        self, request: InferRequest, outputs: Sequence[str], streams: bool, running: dict[InferRequest, Request]
    ) -> None:
        self._request, self._outputs, self._streams, self._running = request, outputs, streams, running
        self._text: list[str] = []
        self._logprobs: list[float] = []
        self._sum, self.has_ended = 0.0, False

    def deliver(self, deltas: Sequence[Delta]) -> None:
        request = self._request
        if request.bill is not None:
            request.bill.add(generated=sum(len(delta.token_ids) for delta in deltas))
        for delta in deltas:
            self._text.append(delta.text)
            self._logprobs += [one.logprob for one in delta.logprobs or ()]
        end = deltas[-1].finish_reason
        if end is not None:
            self.has_ended = True
            self._running.pop(request, None)
        if end is FinishReason.ERROR:
            request.fail(StatusError(Code.INTERNAL, f"{request.named}{deltas[-1].error}"))
        elif end is FinishReason.ABORT:
            request.fail(StatusError(Code.CANCELLED, f"{request.named}the request was cancelled"))
        elif end is not None:
            request.send(self._response(end))
        elif self._streams and any(self._text):
            request.send(self._response(None), final=False)

    def _response(self, end: FinishReason | None) -> InferResponse:
        """On the engine's thread, which the step under way waits for: nothing is made that nobody wants."""
        self._sum += sum(self._logprobs)
        batch = self._request.batch_size > 0
        found = {name: self._output(name, end) for name in self._outputs}
        self._text, self._logprobs = [], []
        return InferResponse({name: array[None] for name, array in found.items()} if batch else found)

    def _output(self, name: str, end: FinishReason | None) -> Array:
        if name == OUT:
            return _single_value("".join(self._text))
        if name == "finish_reason":
            return _NOT_ENDED if end is None else _single_value(end)
        return np.array([self._sum] if name == "cum_log_probs" else self._logprobs, np.float32)


def _single_value(text: str) -> Array:
    return objects([text.encode("utf-8", "surrogatepass")])


_NOT_ENDED = _single_value("")
_NOT_ENDED.flags.writeable = False  # it is told with every token


def sampling(request: InferRequest) -> tuple[SamplingParams, bool]:
    """By its tensors, or its parameters of the same names; and whether it wants a stream. raises StatusError"""
    said: dict[str, Any] = dict(request.parameters)
    for name, array in request.inputs.items():
        if name != TEXT and name not in _SEVERAL:
            said[name] = _scalar(request, name, array)
    params: dict[str, Any] = {}
    for name, value in said.items():
        if name in _SAMPLING:
            params[_SAMPLING[name][1]] = float(value) if _SAMPLING[name][0] == "FP32" else value
        elif name in _ONLY and value not in _ONLY[name][1]:
            raise StatusError(Code.UNSUPPORTED, f"{request.named}{name} is {value}, which is not supported")
        elif name not in _ONLY and name not in _OTHERS:
            known = [*_SAMPLING, *_ONLY, *_OTHERS]
            raise invalid(f"{request.named}unexpected parameter '{name}': {nearest(name, known)}")
    params |= _sampling_parameters(request, said.get("sampling_parameters"))
    if any(texts_of(request, "bad_words")):
        raise StatusError(Code.UNSUPPORTED, f"{request.named}bad_words is not supported")
    if stop := [text for text in texts_of(request, "stop_words") if text]:
        params["stop"] = stop
    if (end_id := said.get("end_id")) is not None and end_id >= 0:
        params["stop_token_ids"] = [end_id]
    if any(said.get(name) for name in _WITH_LOGPROBS) or not _LOGPROBS.isdisjoint(request.outputs):
        params["logprobs"] = 0
    params.setdefault("max_tokens", COMPLETION_TOKENS)
    return SamplingParams(**params), bool(said.get("stream", False))


def _sampling_parameters(request: InferRequest, given: str | bytes | None) -> dict[str, Any]:
    """Those of vLLM's backend: a JSON object by the names of `SamplingParams`. raises StatusError"""
    if not given:
        return {}
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid(f"{request.named}sampling_parameters is {given!r:.80}, and a JSON object is expected")
    return found


def _scalar(request: InferRequest, name: str, array: Array) -> Any:
    if array.size != 1:
        raise invalid(f"{request.named}{name} has {array.size} elements, and one is expected")
    value = array.reshape(-1)[0]
    return value if isinstance(value, bytes) else value.item()


# ---------------------------------------------------------------------- which engine


def _opened(given: InstanceContext) -> RunningModel | OpenedEncoder:
    """raises StatusError, MillraceError"""
    named = _named(given.config)
    parameters = {key: p.string_value for key, p in given.config.parameters.items() if key != "model"}
    build, run = _settings(given.config.name, parameters)
    # a version's folder is named 1
    model = named or (given.config.name, _place(given.folder / str(given.version)))
    name, engine = find_engine(model, build, read_env(), pricing=pricing, place=run.place)
    return open_any(name, engine, run)


def _named(config: ModelConfig) -> str:
    """The bundled or built model that its parameter names; "": none. raises StatusError"""
    said = config.parameters.get("model")
    place = said.string_value if said is not None else ""
    if said is not None and ("/" in place or place in ("", ".", "..")):
        raise invalid(f"parameter 'model' is '{place:.60}': the name of a bundled or built model is expected")
    return place


def _is_encoder(config: ModelConfig, folder: Path) -> bool:
    """By the files of its highest version; what is wrong with them is said where they are opened."""
    try:
        if named := _named(config):
            return encoder.is_encoder(model_folder(named, read_env())[1])
        versions = [p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit()]
        return encoder.is_encoder(_place(max(versions, key=lambda p: int(p.name))))
    except (StatusError, MillraceError):
        return False


def _as_status(error: MillraceError) -> StatusError:
    return StatusError(Code.INTERNAL, f"{error.what}; expected: {error.expected}; to mend: {error.mend}")


def _place(folder: Path) -> Path:
    """Of a version's checkpoint, engine or GGUF file: the folder, or the one thing in it. raises StatusError"""
    if any((folder / name).is_file() for name in _CHECKPOINT):
        return folder
    there = sorted(folder.iterdir())
    found = [p for p in there if is_gguf(p) or any((p / name).is_file() for name in _CHECKPOINT)]
    if len(found) != 1:
        what = f"{folder.name}/ holds {len(found)} checkpoints, engines or GGUF files, and one is expected"
        raise StatusError(Code.INTERNAL, f"{what}; or name a bundled or built model by the parameter 'model'")
    return found[0]


def _settings(model: str, parameters: Mapping[str, str]) -> tuple[BuildSettings, RunSettings]:
    """By the names of the command line's. raises StatusError, ConfigError"""
    kinds = (BuildSettings, RunSettings)
    known = [f.name for kind in kinds for f in fields(kind)]
    for name in parameters:
        if name not in known:
            raise invalid(f"model '{model}' has the parameter '{name}': {nearest(name, ['model', *known])}")
    values = {name: _value(kinds, name, text) for name, text in parameters.items()}
    build, run = ({n: v for n, v in values.items() if n in {f.name for f in fields(k)}} for k in kinds)
    return BuildSettings(**build), RunSettings(**run)


def _value(kinds: Sequence[type[Settings]], name: str, text: str) -> Any:
    (kind,) = (k for k in kinds if name in {f.name for f in fields(k)})
    plain = plain_type(kind, name)
    try:
        if plain is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if plain is int and not text.isdigit():
            return parse_size(text, name)
        return plain(text)
    except (KeyError, ValueError):
        raise invalid(f"failed to parse parameter '{name}': '{text:.40}'") from None
