"""Backend `millrace`: language models in a model repository, with the tensors of TensorRT-LLM's models.

The version's folder is or contains a checkpoint, an engine or a GGUF file; or the parameter `model` names a bundled or
built model. Requests of all clients share the engine's steps, so one instance suffices. If the model is decoupled, a
request with `stream` gets a response per step, any other request gets one. Results equal those of `/v1/completions`
with the same parameters.
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
from millrace.model_repository.backends.text_backend import EngineInstance, begin_each, input_texts
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
from millrace.tune.precision_selector import precision_selector

TEXT, OUT = "text_input", "text_output"
_CHECKPOINT = ("config.json", "manifest.json")
# Sampling inputs by TensorRT-LLM's names: data type, and our parameter name.
_SAMPLING: Mapping[str, tuple[str, str]] = {
    "max_tokens": ("INT32", "max_tokens"), "min_length": ("INT32", "min_tokens"), "min_tokens": ("INT32", "min_tokens"),
    "temperature": ("FP32", "temperature"), "top_k": ("INT32", "top_k"), "top_p": ("FP32", "top_p"),
    "min_p": ("FP32", "min_p"), "repetition_penalty": ("FP32", "repetition_penalty"),
    "presence_penalty": ("FP32", "presence_penalty"), "frequency_penalty": ("FP32", "frequency_penalty"),
    "random_seed": ("UINT64", "seed"), "seed": ("UINT64", "seed"), "ignore_eos": ("BOOL", "ignore_eos"),
}  # fmt: skip
# Inputs of which only values with the default behaviour are accepted.
_ONLY: Mapping[str, tuple[str, Sequence[float]]] = {
    "beam_width": ("INT32", (0, 1)), "num_return_sequences": ("INT32", (0, 1)), "length_penalty": ("FP32", (0, 1)),
    "return_context_logits": ("BOOL", (0,)), "return_generation_logits": ("BOOL", (0,)),
    # vLLM's
    "exclude_input_in_output": ("BOOL", (1,)), "return_num_input_tokens": ("BOOL", (0,)),
    "return_num_output_tokens": ("BOOL", (0,)), "return_finish_reason": ("BOOL", (0, 1)),
}  # fmt: skip
_WITH_LOGPROBS = ("return_log_probs", "return_cumulative_logprob", "return_logprobs")
_OTHER_INPUTS = {
    **dict.fromkeys(_WITH_LOGPROBS, "BOOL"), "stream": "BOOL", "sampling_parameters": "STRING", "stop_words": "STRING",
    "bad_words": "STRING", "end_id": "INT32", "pad_id": "INT32",
}  # fmt: skip
_SEVERAL = ("stop_words", "bad_words")
_LOGPROBS = frozenset({"cum_log_probs", "output_log_probs"})  # only if requested
_OUTPUTS = {OUT: "STRING", "cum_log_probs": "FP32", "output_log_probs": "FP32", "finish_reason": "STRING"}


class EngineBackend(ModelBackend):
    """Backend for language models and, depending on the model's files, text encoders (`encoder.py`)."""

    def instance(self, context: InstanceContext) -> Instance:
        config = context.config
        if sum(group.count for group in config.instance_group) != 1:
            raise invalid(
                f"model '{config.name}' must have one instance: it computes the requests of all clients together"
            )
        if not _is_encoder(config, context.folder):
            for name in (o.name for o in config.output):
                if name not in _OUTPUTS:
                    raise invalid(f"unexpected inference output '{name}', allowed outputs are: {', '.join(_OUTPUTS)}")
        try:
            opened = _open_engine(context)
            return _LanguageModel(context, opened) if isinstance(opened, RunningModel) else Encoder(context, opened)
        except MillraceError as error:
            raise _to_status_error(error) from error

    def complete_config(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """Complete the configuration. A language model gets all inputs, optional except the text, and is decoupled
        unless its policy says otherwise; an encoder gets texts and vectors. raises StatusError"""
        if _is_encoder(config, folder):
            return encoder.complete_config(config)
        if config.model_transaction_policy is None:
            policy = replace(empty(TransactionPolicy), decoupled=True)
            config = replace(config, model_transaction_policy=policy)
        kinds = {**{k: kind for k, (kind, _) in (*_SAMPLING.items(), *_ONLY.items())}, **_OTHER_INPUTS}
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
    def __init__(self, context: InstanceContext, opened: RunningModel) -> None:
        """opened: closed with the instance."""
        config = context.config
        self._streams = bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)
        self._outputs, self._opened = [o.name for o in config.output], opened
        self._running: dict[InferRequest, Request] = {}
        self._loop = self._opened.loop()
        super().__init__(self._loop.thread)
        self._loop.start(self._report_dead_engine)

    def execute(self, requests: Sequence[InferRequest]) -> None:
        begin_each(requests, self._begin)

    def _begin(self, request: InferRequest) -> None:
        """Submit a request to the engine. raises StatusError, RequestError, BusyError"""
        text = input_texts(request, TEXT)
        if len(text) != 1:
            raise invalid(f"{request.error_prefix}{TEXT} has {len(text)} texts, and one a request is expected")
        params, streams = sampling(request)
        if streams and not self._streams:
            raise invalid(f"{request.error_prefix}stream is asked of a model without the decoupled transaction policy")
        _, ids = prompt_tokens(self._opened.tokenizer, text[0])
        outputs = request.outputs or [n for n in self._outputs if n not in _LOGPROBS or params.logprobs is not None]
        answer = _RequestOutput(request, outputs, streams, self._running)
        engine_request = self._loop.submit(ids, params, answer.deliver, request.id or None)
        if request.token_usage is not None:
            request.token_usage.add(prompt=len(ids))
        self._running[request] = engine_request
        if answer.has_ended:  # the engine's thread has already finished it
            self._running.pop(request, None)
        if request.cancelled:
            self._loop.cancel(engine_request)

    def on_cancel(self, request: InferRequest) -> None:
        if (engine_request := self._running.get(request)) is not None:
            self._loop.cancel(engine_request)

    def close(self) -> None:
        self._loop.stop()
        self._opened.close()


class _RequestOutput:
    """Collects the output of one request, on the engine's thread.

    outputs: names to respond with. running: holds the request until it ends
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
        if request.token_usage is not None:
            request.token_usage.add(generated=sum(len(delta.token_ids) for delta in deltas))
        for delta in deltas:
            self._text.append(delta.text)
            self._logprobs += [token.logprob for token in delta.logprobs or ()]
        end = deltas[-1].finish_reason
        if end is not None:
            self.has_ended = True
            self._running.pop(request, None)
        if end is FinishReason.ERROR:
            request.fail(StatusError(Code.INTERNAL, f"{request.error_prefix}{deltas[-1].error}"))
        elif end is FinishReason.ABORT:
            request.fail(StatusError(Code.CANCELLED, f"{request.error_prefix}the request was cancelled"))
        elif end is not None:
            request.send(self._response(end))
        elif self._streams and any(self._text):
            request.send(self._response(None), final=False)

    def _response(self, end: FinishReason | None) -> InferResponse:
        """Create a response with only the requested outputs, because the engine's step waits for it."""
        self._sum += sum(self._logprobs)
        batch = self._request.batch_size > 0
        outputs = {name: self._output(name, end) for name in self._outputs}
        self._text, self._logprobs = [], []
        return InferResponse({name: array[None] for name, array in outputs.items()} if batch else outputs)

    def _output(self, name: str, end: FinishReason | None) -> Array:
        if name == OUT:
            return _single_value("".join(self._text))
        if name == "finish_reason":
            return _NOT_ENDED if end is None else _single_value(end)
        return np.array([self._sum] if name == "cum_log_probs" else self._logprobs, np.float32)


def _single_value(text: str) -> Array:
    return objects([text.encode("utf-8", "surrogatepass")])


_NOT_ENDED = _single_value("")
_NOT_ENDED.flags.writeable = False  # shared by all streamed responses


def sampling(request: InferRequest) -> tuple[SamplingParams, bool]:
    """Read sampling parameters from inputs or request parameters, and whether to stream. raises StatusError"""
    options: dict[str, Any] = dict(request.parameters)
    for name, array in request.inputs.items():
        if name != TEXT and name not in _SEVERAL:
            options[name] = _scalar(request, name, array)
    params: dict[str, Any] = {}
    for name, value in options.items():
        if name in _SAMPLING:
            params[_SAMPLING[name][1]] = float(value) if _SAMPLING[name][0] == "FP32" else value
        elif name in _ONLY and value not in _ONLY[name][1]:
            raise StatusError(Code.UNSUPPORTED, f"{request.error_prefix}{name} is {value}, which is not supported")
        elif name not in _ONLY and name not in _OTHER_INPUTS:
            names = [*_SAMPLING, *_ONLY, *_OTHER_INPUTS]
            raise invalid(f"{request.error_prefix}unexpected parameter '{name}': {nearest(name, names)}")
    params |= _sampling_parameters(request, options.get("sampling_parameters"))
    if any(input_texts(request, "bad_words")):
        raise StatusError(Code.UNSUPPORTED, f"{request.error_prefix}bad_words is not supported")
    if stop := [text for text in input_texts(request, "stop_words") if text]:
        params["stop"] = stop
    if (end_id := options.get("end_id")) is not None and end_id >= 0:
        params["stop_token_ids"] = [end_id]
    if any(options.get(name) for name in _WITH_LOGPROBS) or not _LOGPROBS.isdisjoint(request.outputs):
        params["logprobs"] = 0
    params.setdefault("max_tokens", COMPLETION_TOKENS)
    return SamplingParams(**params), bool(options.get("stream", False))


def _sampling_parameters(request: InferRequest, text: str | bytes | None) -> dict[str, Any]:
    """Parse vLLM's `sampling_parameters`, a JSON object of `SamplingParams`. raises StatusError"""
    if not text:
        return {}
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        raise invalid(f"{request.error_prefix}sampling_parameters is {text!r:.80}, and a JSON object is expected")
    return parameters


def _scalar(request: InferRequest, name: str, array: Array) -> Any:
    if array.size != 1:
        raise invalid(f"{request.error_prefix}{name} has {array.size} elements, and one is expected")
    value = array.reshape(-1)[0]
    return value if isinstance(value, bytes) else value.item()


# ---------------------------------------------------------------------- which engine


def _open_engine(context: InstanceContext) -> RunningModel | OpenedEncoder:
    """Open the instance's engine. raises StatusError, MillraceError"""
    model_path = _parameter_model(context.config)
    parameters = {key: p.string_value for key, p in context.config.parameters.items() if key != "model"}
    build, run = _settings(context.config.name, parameters)
    # a version's folder is named 1
    model = model_path or (context.config.name, _place(context.folder / str(context.version)))
    name, engine = find_engine(model, build, read_env(), new_selector=precision_selector, place=run.place)
    return open_any(name, engine, run)


def _parameter_model(config: ModelConfig) -> str:
    """Return the bundled or built model that parameter `model` names; "" if none. raises StatusError"""
    parameter = config.parameters.get("model")
    place = parameter.string_value if parameter is not None else ""
    if parameter is not None and ("/" in place or place in ("", ".", "..")):
        raise invalid(f"parameter 'model' is '{place:.60}': the name of a bundled or built model is expected")
    return place


def _is_encoder(config: ModelConfig, folder: Path) -> bool:
    """Return whether the highest version is an encoder; invalid files are reported when they are opened."""
    try:
        if model_path := _parameter_model(config):
            return encoder.is_encoder(model_folder(model_path, read_env())[1])
        versions = [p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit()]
        return encoder.is_encoder(_place(max(versions, key=lambda p: int(p.name))))
    except (StatusError, MillraceError):
        return False


def _to_status_error(error: MillraceError) -> StatusError:
    return StatusError(Code.INTERNAL, f"{error.what}; expected: {error.expected}; to fix: {error.fix}")


def _place(folder: Path) -> Path:
    """Return a version's checkpoint, engine or GGUF file: the folder itself, or its only one. raises StatusError"""
    if any((folder / name).is_file() for name in _CHECKPOINT):
        return folder
    entries = sorted(folder.iterdir())
    candidates = [p for p in entries if is_gguf(p) or any((p / name).is_file() for name in _CHECKPOINT)]
    if len(candidates) != 1:
        message = f"{folder.name}/ holds {len(candidates)} checkpoints, engines or GGUF files, and one is expected"
        raise StatusError(Code.INTERNAL, f"{message}; or name a bundled or built model by the parameter 'model'")
    return candidates[0]


def _settings(model: str, parameters: Mapping[str, str]) -> tuple[BuildSettings, RunSettings]:
    """Parse parameters with the names of command-line flags. raises StatusError, ConfigError"""
    kinds = (BuildSettings, RunSettings)
    names = [f.name for kind in kinds for f in fields(kind)]
    for name in parameters:
        if name not in names:
            raise invalid(f"model '{model}' has the parameter '{name}': {nearest(name, ['model', *names])}")
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
