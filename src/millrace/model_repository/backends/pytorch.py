"""`pytorch`: a network of PyTorch on the CPU, TorchScript or a program of torch.export; the package is an extra.

Inputs have the names of forward's arguments, or INPUT__0, INPUT__1, ... by their places; outputs OUTPUT__0, ... by
theirs, or the keys of a dictionary that the network returns. Names that are neither stand for the order of the
configuration. `torch_archive_check.py` looks at a file before PyTorch does. Each instance has a network and threads of
its own; all instances together use the cores of this machine, unless `INTRA_OP_THREAD_COUNT` is set.
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
    ModelSignature,
    Sides,
    failing,
    flag,
    n_threads,
    number,
    package,
    set_parameters,
    texts,
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

    def instance(self, given: InstanceContext) -> "_Network":
        return _Network(given)

    def sides(self, config: ModelConfig, file: Path) -> Sides:
        """Of a program of torch.export; TorchScript does not say what its tensors are."""
        loaded = _loaded(file)
        if isinstance(loaded, _Script):
            what = f"model '{config.name}' must say its inputs and outputs in config.pbtxt: TorchScript does not know"
            raise invalid(f"{what} types and shapes; forward is {loaded.schema}")
        return loaded.inputs, loaded.outputs


class _Network(FrameworkModel):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)
        config = self.inner
        self._torch, self._is_inference, self._is_optimised = _torch(), True, True
        self._set(config)
        self._loaded = _loaded(given.file)
        self._places = _input_places(config, self._loaded)
        self._outputs = {
            said.name: (said.data_type.name, place)
            for said, place in zip(config.output, _output_places(config, self._loaded), strict=True)
        }
        ours = (*self._loaded.module.parameters(), *self._loaded.module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in ours}
        self._compare()

    def _set(self, config: ModelConfig) -> None:
        """In its thread, whose number of threads PyTorch keeps for it alone."""
        threads = n_threads(config)

        def intra(key: str, text: str) -> None:
            nonlocal threads
            threads = number(config, key, text, least=1)

        def inter(key: str, text: str) -> None:
            n = number(config, key, text, least=1)
            try:
                if n != self._torch.get_num_interop_threads():
                    self._torch.set_num_interop_threads(n)
            except RuntimeError:  # for good, once anything ran
                log.warning("model '%s': %s is the process's, and is set already", config.name, key)

        def optimised(key: str, text: str) -> None:
            self._is_optimised = not flag(config, key, text)

        def inference(key: str, text: str) -> None:
            self._is_inference = flag(config, key, text)

        set_parameters(config, {
            "INTRA_OP_THREAD_COUNT": intra, "INTER_OP_THREAD_COUNT": inter,
            "DISABLE_OPTIMIZED_EXECUTION": optimised, "INFERENCE_MODE": inference,
        })  # fmt: skip
        self._torch.get_num_threads()  # else this thread's first operator takes what whatever thread set last
        self._torch.set_num_threads(threads)

    def _compare(self) -> None:
        """With what the file says, by the configuration's names. raises StatusError"""
        inputs, outputs = self._loaded.inputs, self._loaded.outputs
        named = [replace(inputs[i], name=name) for name, i in self._places.items() if isinstance(i, int)]
        named += [ModelSignature(name, None, None) for name, place in self._places.items() if isinstance(place, str)]
        made = [
            replace(outputs[place], name=name)
            if isinstance(place, int) and outputs
            else ModelSignature(name, None, None)
            for name, (_, place) in self._outputs.items()
        ]
        self.check(named, made)

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        given = {self._places[name]: self._tensor(name, array) for name, array in inputs.items()}
        torch = self._torch
        with failing(_WHO), torch.inference_mode(self._is_inference), torch.set_grad_enabled(False):
            if self._is_optimised:
                found = self._loaded.run(given)
            else:
                with torch.jit.optimized_execution(False):
                    found = self._loaded.run(given)
        return {name: self._array(name, kind, place, found) for name, (kind, place) in self._outputs.items()}

    def _tensor(self, name: str, array: Array) -> Any:
        if array.dtype == np.object_:
            return texts(name, array).reshape(-1).tolist()
        if not array.flags.writeable or any(step < 0 for step in array.strides):
            array = array.copy()  # a network may write into its inputs; a request's are its own
        if array.dtype == ml_dtypes.bfloat16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def _array(self, name: str, kind: str, place: int | str, found: Mapping[int | str, Any]) -> Array:
        """One output. raises StatusError, in Triton's words"""
        if place not in found:
            what = f"The output {name} in the model configuration refers to an output index which doesn't exist"
            raise invalid(f"{what}. This model has {len(found)} outputs")
        value = found[place]
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            made, provided = objects([text.encode() for text in value]), "STRING"
        elif isinstance(value, self._torch.Tensor):
            provided = _kind(value.dtype) or str(value.dtype)
            if value.dim() == 0:
                raise invalid(f"output '{name}' is a scalar which is not supported.")
            if value.untyped_storage().data_ptr() in self._own:
                value = value.clone()  # else the next request may write into this one's answer
            with failing(_WHO):
                raw = value.view(self._torch.int16) if provided == "BF16" else value
                made = raw.numpy(force=True)
                made = made.view(ml_dtypes.bfloat16) if provided == "BF16" else made
        else:
            raise invalid(f"output '{name}' is {type(value).__name__}, neither a tensor nor a list of strings")
        if kind != f"TYPE_{provided}":
            what = f"configuration expects datatype {kind} for output '{name}', model provides TYPE_{provided}"
            raise invalid(what)
        return made

    def close(self) -> None:
        del self._loaded


def _torch() -> Any:
    """The package. raises StatusError where it is not there"""
    return package("torch", "pytorch")


def _kind(dtype: Any) -> str:
    return _TYPES.get(str(dtype).removeprefix("torch."), "")


def _type(argument: Any) -> str:
    return str(argument.type.annotation_str)


class _Script:
    """TorchScript. inputs: forward's arguments, of which it knows the names"""

    outputs: Sequence[ModelSignature] = ()  # it does not say

    def __init__(self, file: Path) -> None:
        with failing(_WHO):
            self.module = _torch().jit.load(file, map_location="cpu").eval()
            self.schema = self.module.forward.schema
        said = self.schema.arguments[1:]
        self.takes_dict = [_type(a) for a in said] == [_DICTIONARY]
        wrong = next((a for a in said if not self.takes_dict and _type(a) not in _TENSORS), None)
        if wrong is not None:
            expected = f"{', '.join(_TENSORS)} and one {_DICTIONARY} are supported"
            raise invalid(f"argument '{wrong.name}' of forward is of the type {_type(wrong)}; {expected}")
        self.inputs = [ModelSignature(a.name, "STRING" if _type(a) == _STRINGS else None, None) for a in said]
        self.n_required = sum(not a.has_default_value() for a in said)

    def run(self, given: Mapping[int | str, Any]) -> Mapping[int | str, Any]:
        if self.takes_dict:
            return _by_place(self.module(given))
        return _by_place(
            self.module(**{self.inputs[i].name: value for i, value in given.items() if isinstance(i, int)})
        )


class _Program:
    """Of torch.export, which says what its tensors are."""

    takes_dict = False

    def __init__(self, file: Path) -> None:
        copy, torch = torch_archive_check.program(file), _torch()
        with _READING, failing(_WHO):
            loaded = torch.export.load(copy)
            self.module = loaded.module()
        self.schema = loaded.graph_signature
        values = {node.name: node.meta.get("val") for node in loaded.graph.nodes}
        self.inputs = [_told(name, values[name]) for name in _names(self.schema.user_inputs)]
        self.n_required = len(self.inputs)
        self._spec = loaded.call_spec.in_spec
        keys = loaded.call_spec.out_spec.context if loaded.call_spec.out_spec.type is dict else None
        names = _names(self.schema.user_outputs)
        self.outputs = [_told(keys[i] if keys else f"OUTPUT__{i}", values[name]) for i, name in enumerate(names)]

    def run(self, given: Mapping[int | str, Any]) -> Mapping[int | str, Any]:
        flat = [given[i] for i in range(self.n_required)]
        args, kwargs = _torch().utils._pytree.tree_unflatten(flat, self._spec)
        return _by_place(self.module(*args, **kwargs))


_Loaded = _Script | _Program


def _loaded(file: Path) -> _Loaded:
    """raises StatusError"""
    _torch()
    return _Script(file) if torch_archive_check.script(file) else _Program(file)


def _names(said: Sequence[Any]) -> list[str]:
    wrong = next((one for one in said if not isinstance(one, str)), None)
    if wrong is not None:
        raise invalid(f"inputs and outputs of the exported program must be tensors, one is {wrong!r:.80}")
    return list(said)


def _told(name: str, value: Any) -> ModelSignature:
    """By a tensor without data."""
    if not isinstance(value, _torch().Tensor):
        raise invalid(f"inputs and outputs of the exported program must be tensors, '{name}' is {value!r:.80}")
    dims = tuple(d if isinstance(d, int) else -1 for d in value.shape)
    return ModelSignature(name, _kind(value.dtype), dims, str(value.dtype))


def _by_place(found: Any) -> dict[int | str, Any]:
    """What a network returned, by place, and by key where it is a dictionary."""
    if isinstance(found, dict):
        return {**dict(enumerate(found.values())), **found}
    is_many = isinstance(found, tuple) or (isinstance(found, list) and not all(isinstance(v, str) for v in found))
    return dict(enumerate(found)) if is_many else {0: found}


def _input_places(config: ModelConfig, loaded: _Loaded) -> dict[str, int | str]:
    """Which argument each input is; the key of a dictionary that forward takes. raises StatusError"""
    if loaded.takes_dict:
        return {said.name: said.name for said in config.input}
    places = _places(config, config.input, [told.name for told in loaded.inputs], "input")
    n, most, least = len(places), len(loaded.inputs), loaded.n_required
    beyond = next((said.name for said, i in zip(config.input, places, strict=True) if i >= most), None)
    if not least <= n <= most or beyond is not None:
        provides = f"at most {most}" if n > most or beyond is not None else f"at least {least}"
        beyond_ = f", and has no place for '{beyond}'" if beyond is not None else ""
        what = f"unable to load model '{config.name}', configuration expects {n} inputs, model provides {provides}"
        raise invalid(what + beyond_)
    return {said.name: place for said, place in zip(config.input, places, strict=True)}


def _output_places(config: ModelConfig, loaded: _Loaded) -> list[int | str]:
    """raises StatusError"""
    names = [told.name for told in loaded.outputs]
    if names and all(said.name in names for said in config.output):
        return [names.index(said.name) for said in config.output]
    is_dict = isinstance(loaded, _Script) and _type(loaded.schema.returns[0]) == _DICTIONARY
    if is_dict:
        return [said.name for said in config.output]
    places = _places(config, config.output, [], "output")
    beyond = next((said.name for said, i in zip(config.output, places, strict=True) if names and i >= len(names)), None)
    if beyond is not None:
        what = f"The output {beyond} in the model configuration refers to an output index which doesn't exist"
        raise invalid(f"{what}. This model has {len(names)} outputs")
    return list(places)


def _places(
    config: ModelConfig, said: Sequence[ModelInput | ModelOutput], names: Sequence[str], side: str
) -> list[int]:
    """Triton's rules: names of arguments, or NAME__INDEX, or else the order of the configuration."""
    if all(one.name in names for one in said):
        return [names.index(one.name) for one in said]
    indices = [_INDEXED.fullmatch(one.name) for one in said]
    places = [int(found[1]) for found in indices if found]
    if len(places) < len(said):
        odd = next(one.name for one, found in zip(said, indices, strict=True) if not found)
        log.warning(
            "model '%s': %s '%s' is neither an argument of forward nor does it follow <name>__<index>: the order of "
            "the configuration is taken", config.name, side, odd,
        )  # fmt: skip
        return list(range(len(said)))
    if len(set(places)) < len(places):
        raise invalid(f"two {side}s of model '{config.name}' have the same index")
    return places
