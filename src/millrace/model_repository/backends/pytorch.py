"""Backend `pytorch`: TorchScript models and torch.export programs on the CPU; an optional package.

Inputs are named after forward's arguments, or INPUT__0, INPUT__1, ... by position; outputs are OUTPUT__0, ... by
position, or the keys of a returned dictionary. With other names, the configuration's order counts.
`torch_archive_check.py` checks a file before PyTorch reads it. Each instance has its own model and threads; all
instances together use the machine's cores, unless `INTRA_OP_THREAD_COUNT` is set.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np

from millrace.model_repository.backends import torch_archive_check
from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    TensorSignature,
    decode_texts,
    flag,
    framework_errors,
    import_package,
    n_threads,
    number,
    set_parameters,
)
from millrace.model_repository.config.model_config import ModelConfig, ModelInput, ModelOutput
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.request.tensors import Array, objects

_WHO = "PyTorch"
_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64",
}  # fmt: skip
_STRINGS, _DICTIONARY = "List[str]", "Dict[str, Tensor]"
_TENSORS = ("Tensor", "Optional[Tensor]", _STRINGS)
_INDEXED = re.compile(r".+__(\d{1,6})")
_READING = Lock()  # torch.export reads one program of a process at a time, and refuses a second
log = logging.getLogger(__name__)


class PytorchBackend(FrameworkBackend):
    takes_ragged = takes_batch_io = True

    def instance(self, context: InstanceContext) -> "_PyTorchModel":
        return _PyTorchModel(context)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        """Read the signatures of a torch.export program; TorchScript does not declare its tensors."""
        loaded = _load(file)
        if isinstance(loaded, _Script):
            message = (
                f"model '{config.name}' must say its inputs and outputs in config.pbtxt: TorchScript does not know"
            )
            raise invalid(f"{message} types and shapes; forward is {loaded.schema}")
        return loaded.inputs, loaded.outputs


class _PyTorchModel(FrameworkModel):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        config = self.inner
        self._torch, self._is_inference, self._is_optimised = _torch(), True, True
        self._set(config)
        self._loaded = _load(context.file)
        self._places = _input_places(config, self._loaded)
        self._outputs = {
            output.name: (output.data_type.name, place)
            for output, place in zip(config.output, _output_places(config, self._loaded), strict=True)
        }
        ours = (*self._loaded.module.parameters(), *self._loaded.module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in ours}
        self._compare()

    def _set(self, config: ModelConfig) -> None:
        """Apply parameters in the instance's thread, because PyTorch's thread count is per thread."""
        threads = n_threads(config)

        def intra(key: str, text: str) -> None:
            nonlocal threads
            threads = number(config, key, text, min_value=1)

        def inter(key: str, text: str) -> None:
            n = number(config, key, text, min_value=1)
            try:
                if n != self._torch.get_num_interop_threads():
                    self._torch.set_num_interop_threads(n)
            except RuntimeError:  # fixed once anything has run
                log.warning("model '%s': %s is the process's, and is set already", config.name, key)

        def optimised(key: str, text: str) -> None:
            self._is_optimised = not flag(config, key, text)

        def inference(key: str, text: str) -> None:
            self._is_inference = flag(config, key, text)

        set_parameters(config, {
            "INTRA_OP_THREAD_COUNT": intra, "INTER_OP_THREAD_COUNT": inter,
            "DISABLE_OPTIMIZED_EXECUTION": optimised, "INFERENCE_MODE": inference,
        })  # fmt: skip
        self._torch.get_num_threads()  # without this, the first operator uses the value last set by any thread
        self._torch.set_num_threads(threads)

    def _compare(self) -> None:
        """Compare the configuration with the file. raises StatusError"""
        inputs, outputs = self._loaded.inputs, self._loaded.outputs
        tensor_signatures = [replace(inputs[i], name=name) for name, i in self._places.items() if isinstance(i, int)]
        tensor_signatures += [
            TensorSignature(name, None, None) for name, place in self._places.items() if isinstance(place, str)
        ]
        produced = [
            replace(outputs[place], name=name)
            if isinstance(place, int) and outputs
            else TensorSignature(name, None, None)
            for name, (_, place) in self._outputs.items()
        ]
        self.check(tensor_signatures, produced)

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        arguments = {self._places[name]: self._tensor(name, array) for name, array in inputs.items()}
        torch = self._torch
        with framework_errors(_WHO), torch.inference_mode(self._is_inference), torch.set_grad_enabled(False):
            if self._is_optimised:
                results = self._loaded.run(arguments)
            else:
                with torch.jit.optimized_execution(False):
                    results = self._loaded.run(arguments)
        return {name: self._array(name, kind, place, results) for name, (kind, place) in self._outputs.items()}

    def _tensor(self, name: str, array: Array) -> Any:
        if array.dtype == np.object_:
            return decode_texts(name, array).reshape(-1).tolist()
        if not array.flags.writeable or any(step < 0 for step in array.strides):
            array = array.copy()  # a model may write into its inputs, but not into a request's
        if array.dtype == ml_dtypes.bfloat16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def _array(self, name: str, kind: str, place: int | str, results: Mapping[int | str, Any]) -> Array:
        """Return one output as an array. raises StatusError with Triton's text"""
        if place not in results:
            message = f"The output {name} in the model configuration refers to an output index which doesn't exist"
            raise invalid(f"{message}. This model has {len(results)} outputs")
        value = results[place]
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            converted, provided = objects([text.encode() for text in value]), "STRING"
        elif isinstance(value, self._torch.Tensor):
            provided = _kind(value.dtype) or str(value.dtype)
            if value.dim() == 0:
                raise invalid(f"output '{name}' is a scalar which is not supported.")
            if value.untyped_storage().data_ptr() in self._own:
                value = value.clone()  # otherwise the next request may overwrite this response
            with framework_errors(_WHO):
                raw = value.view(self._torch.int16) if provided == "BF16" else value
                converted = raw.numpy(force=True)
                converted = converted.view(ml_dtypes.bfloat16) if provided == "BF16" else converted
        else:
            raise invalid(f"output '{name}' is {type(value).__name__}, neither a tensor nor a list of strings")
        if kind != f"TYPE_{provided}":
            message = f"configuration expects datatype {kind} for output '{name}', model provides TYPE_{provided}"
            raise invalid(message)
        return converted

    def close(self) -> None:
        del self._loaded


def _torch() -> Any:
    """Import PyTorch. raises StatusError if it is missing"""
    return import_package("torch", "pytorch")


def _kind(dtype: Any) -> str:
    return _TYPES.get(str(dtype).removeprefix("torch."), "")


def _type(argument: Any) -> str:
    return str(argument.type.annotation_str)


class _Script:
    """A TorchScript model. inputs: forward's arguments, of which only the names are known"""

    outputs: Sequence[TensorSignature] = ()  # not declared

    def __init__(self, file: Path) -> None:
        with framework_errors(_WHO):
            self.module = _torch().jit.load(file, map_location="cpu").eval()
            self.schema = self.module.forward.schema
        arguments = self.schema.arguments[1:]
        self.takes_dict = [_type(a) for a in arguments] == [_DICTIONARY]
        wrong = next((a for a in arguments if not self.takes_dict and _type(a) not in _TENSORS), None)
        if wrong is not None:
            expected = f"{', '.join(_TENSORS)} and one {_DICTIONARY} are supported"
            raise invalid(f"argument '{wrong.name}' of forward is of the type {_type(wrong)}; {expected}")
        self.inputs = [TensorSignature(a.name, "STRING" if _type(a) == _STRINGS else None, None) for a in arguments]
        self.n_required = sum(not a.has_default_value() for a in arguments)

    def run(self, arguments: Mapping[int | str, Any]) -> Mapping[int | str, Any]:
        if self.takes_dict:
            return _by_place(self.module(arguments))
        return _by_place(
            self.module(**{self.inputs[i].name: value for i, value in arguments.items() if isinstance(i, int)})
        )


class _Program:
    """A torch.export program, which declares its tensors."""

    takes_dict = False

    def __init__(self, file: Path) -> None:
        copy, torch = torch_archive_check.copy_program(file), _torch()
        with _READING, framework_errors(_WHO):
            loaded = torch.export.load(copy)
            self.module = loaded.module()
        self.schema = loaded.graph_signature
        values = {node.name: node.meta.get("val") for node in loaded.graph.nodes}
        self.inputs = [_tensor_signature(name, values[name]) for name in _names(self.schema.user_inputs)]
        self.n_required = len(self.inputs)
        self._spec = loaded.call_spec.in_spec
        keys = loaded.call_spec.out_spec.context if loaded.call_spec.out_spec.type is dict else None
        names = _names(self.schema.user_outputs)
        self.outputs = [
            _tensor_signature(keys[i] if keys else f"OUTPUT__{i}", values[name]) for i, name in enumerate(names)
        ]

    def run(self, arguments: Mapping[int | str, Any]) -> Mapping[int | str, Any]:
        flat = [arguments[i] for i in range(self.n_required)]
        args, kwargs = _torch().utils._pytree.tree_unflatten(flat, self._spec)
        return _by_place(self.module(*args, **kwargs))


_Loaded = _Script | _Program


def _load(file: Path) -> _Loaded:
    """Load a checked file. raises StatusError"""
    _torch()
    return _Script(file) if torch_archive_check.check_script(file) else _Program(file)


def _names(names: Sequence[Any]) -> list[str]:
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise invalid(f"inputs and outputs of the exported program must be tensors, one is {wrong!r:.80}")
    return list(names)


def _tensor_signature(name: str, value: Any) -> TensorSignature:
    """Return the signature of a tensor without data."""
    if not isinstance(value, _torch().Tensor):
        raise invalid(f"inputs and outputs of the exported program must be tensors, '{name}' is {value!r:.80}")
    dims = tuple(d if isinstance(d, int) else -1 for d in value.shape)
    return TensorSignature(name, _kind(value.dtype), dims, str(value.dtype))


def _by_place(result: Any) -> dict[int | str, Any]:
    """Index a model's result by position and, for a dictionary, also by key."""
    if isinstance(result, dict):
        return {**dict(enumerate(result.values())), **result}
    is_many = isinstance(result, tuple) or (isinstance(result, list) and not all(isinstance(v, str) for v in result))
    return dict(enumerate(result)) if is_many else {0: result}


def _input_places(config: ModelConfig, loaded: _Loaded) -> dict[str, int | str]:
    """Return each input's argument index, or its key if forward takes a dictionary. raises StatusError"""
    if loaded.takes_dict:
        return {tensor.name: tensor.name for tensor in config.input}
    places = _places(config, config.input, [signature.name for signature in loaded.inputs], "input")
    n, most, least = len(places), len(loaded.inputs), loaded.n_required
    beyond = next((tensor.name for tensor, i in zip(config.input, places, strict=True) if i >= most), None)
    if not least <= n <= most or beyond is not None:
        provides = f"at most {most}" if n > most or beyond is not None else f"at least {least}"
        beyond_ = f", and has no place for '{beyond}'" if beyond is not None else ""
        message = f"unable to load model '{config.name}', configuration expects {n} inputs, model provides {provides}"
        raise invalid(message + beyond_)
    return {tensor.name: place for tensor, place in zip(config.input, places, strict=True)}


def _output_places(config: ModelConfig, loaded: _Loaded) -> list[int | str]:
    """Return the index or key of each output. raises StatusError"""
    names = [signature.name for signature in loaded.outputs]
    if names and all(output.name in names for output in config.output):
        return [names.index(output.name) for output in config.output]
    is_dict = isinstance(loaded, _Script) and _type(loaded.schema.returns[0]) == _DICTIONARY
    if is_dict:
        return [output.name for output in config.output]
    places = _places(config, config.output, [], "output")
    beyond = next(
        (output.name for output, i in zip(config.output, places, strict=True) if names and i >= len(names)), None
    )
    if beyond is not None:
        message = f"The output {beyond} in the model configuration refers to an output index which doesn't exist"
        raise invalid(f"{message}. This model has {len(names)} outputs")
    return list(places)


def _places(
    config: ModelConfig, tensors: Sequence[ModelInput | ModelOutput], names: Sequence[str], side: str
) -> list[int]:
    """Return argument indices by Triton's rules: argument names, NAME__INDEX, or the configuration's order."""
    if all(tensor.name in names for tensor in tensors):
        return [names.index(tensor.name) for tensor in tensors]
    indices = [_INDEXED.fullmatch(tensor.name) for tensor in tensors]
    places = [int(match[1]) for match in indices if match]
    if len(places) < len(tensors):
        odd = next(tensor.name for tensor, match in zip(tensors, indices, strict=True) if not match)
        log.warning(
            "model '%s': %s '%s' is neither an argument of forward nor does it follow <name>__<index>: the order of "
            "the configuration is taken", config.name, side, odd,
        )  # fmt: skip
        return list(range(len(tensors)))
    if len(set(places)) < len(places):
        raise invalid(f"two {side}s of model '{config.name}' have the same index")
    return places
