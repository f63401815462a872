"""Shared by the backends of frameworks: external files and packages, threads, parameters, model signatures.

A backend reads the inputs and outputs of its file as `ModelSignature`. `FrameworkBackend` completes the configuration
with them; `FrameworkModel` compares the configuration with them, with Triton's messages.
"""

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millrace.errors import nearest
from millrace.machine.cpu import memory, usable_cores
from millrace.model_repository.backends.backend import BatchedInstance, InstanceContext, ModelBackend
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import DynamicBatching, ModelConfig, ModelInput, ModelOutput, Reshape
from millrace.model_repository.execution.execution_time import Pace
from millrace.model_repository.request.request_validation import wire_name
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array, objects
from millrace.model_repository.scheduling.ragged_batch import Ragged, with_batch_inputs
from millrace.model_repository.scheduling.sequence_states import whole

DEFAULT_BATCH = 4  # of a model whose configuration says nothing and whose first dimensions are free: Triton's
MOST_THREADS = 4096
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_MOST_FILES = 10_000
Setting = Callable[[str, str], object]  # of its key and text
T = TypeVar("T", ModelInput, ModelOutput)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """One input or output, by the network's file. kind: a data type without TYPE_; "": it has no name here

    dims: with that of the batch; -1: any. None: the file does not say. shown: its type in the framework's own words
    """

    name: str
    kind: str | None
    dims: tuple[int, ...] | None
    shown: str = ""


Sides = tuple[Sequence[ModelSignature], Sequence[ModelSignature]]  # inputs and outputs


# ---------------------------------------------------------------------- the backend and its instances


class FrameworkBackend(ModelBackend):
    """Of files that say what goes in and what comes out. file: what one is called where no configuration says it"""

    file = ""

    @abstractmethod
    def sides(self, config: ModelConfig, file: Path) -> Sides:
        """What the file says of them. raises StatusError"""

    def completed(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """Inputs and outputs by the file of the highest version, and, where it says none of them, its batches."""
        config = replace(config, default_model_filename=config.default_model_filename or self.file)
        file = newest(folder, config.default_model_filename)
        if file is None or (config.input and config.output):
            return config
        return merge_signature(config, *self.sides(config, file))


class FrameworkModel(BatchedInstance):
    """inner: its configuration with what the network is given and gives and clients do not see, as states are"""

    def __init__(self, given: InstanceContext) -> None:
        """raises StatusError"""
        super().__init__(given)
        self.inner = with_batch_inputs(whole(given.config))
        self._pace = Pace()
        refuse_accelerators(self.inner)

    def took(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        """A small network that is quicker than a thread wakes up is computed in the event loop's."""
        self._pace.took(n_bytes, took_ns, cpu_ns)
        self.quick_bytes = self._pace.quick_bytes

    def check(self, inputs: Sequence[ModelSignature], outputs: Sequence[ModelSignature]) -> None:
        """Whether the configuration is this file's. raises StatusError"""
        check(self.inner, inputs, outputs, self._ragged)


# ---------------------------------------------------------------------- what comes from outside


@cache
def package(name: str, extra: str = "") -> Any:
    """A module that comes with one of our extras, which has its name or another. raises StatusError without it"""
    try:
        return import_module(name)
    except ImportError as error:
        extra = extra or name
        what = f"backend '{extra}' needs a package that cannot be imported: {error}"
        raise StatusError(Code.UNSUPPORTED, f"{what}; pip install 'millrace[{extra}]'") from None


@contextmanager
def failing(framework: str) -> Iterator[None]:
    """What it raises, of whatever type, is an answer: this is where code that is not ours begins."""
    try:
        yield
    except StatusError:
        raise
    except Exception as error:
        raise StatusError(Code.INTERNAL, f"{framework} error: {str(error) or type(error).__name__}") from error


def newest(folder: Path, name: str) -> Path | None:
    """The model's file in the highest of its versions that have one."""
    versions = [p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit() and (p / name).exists()]
    return max(versions, key=lambda p: int(p.name)) / name if versions else None


def check_size(file: Path, n_bytes: int | None = None) -> None:
    """Whether it fits into memory, before something reads it. n_bytes: unpacked; None: the file, or all of a folder

    raises StatusError, also where a link in the folder leads out of it
    """
    if n_bytes is None:
        n_bytes = file.stat().st_size if file.is_file() else _folder_bytes(file)
    if n_bytes > memory().total_bytes:
        what = f"{file.parent.name}/{file.name} has {n_bytes} bytes, more than this machine's memory"
        raise StatusError(Code.UNAVAILABLE, f"{what}, {memory().total_bytes} bytes")


def _folder_bytes(folder: Path) -> int:
    n_bytes = n_files = 0
    root = folder.resolve()
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            inner, n_files = Path(path, name), n_files + 1
            if n_files > _MOST_FILES:
                raise invalid(f"{folder.parent.name}/{folder.name} has more than {_MOST_FILES} files")
            if not inner.resolve().is_relative_to(root):
                raise invalid(f"{inner} is a link that leads out of the model's folder")
            n_bytes += inner.lstat().st_size
    return n_bytes


# ---------------------------------------------------------------------- what a configuration asks for


def n_threads(config: ModelConfig) -> int:
    """Of one instance, that all together have the cores of this machine."""
    return max(1, usable_cores() // max(1, sum(group.count for group in config.instance_group)))


def refuse_accelerators(config: ModelConfig) -> None:
    asked = config.optimization.execution_accelerators if config.optimization else None
    if asked and asked.cpu_execution_accelerator:
        name = asked.cpu_execution_accelerator[0].name
        what = f"execution accelerator '{name}' of model '{config.name}' is not supported"
        raise StatusError(Code.UNSUPPORTED, what)


def set_parameters(
    config: ModelConfig, settings: Mapping[str, Setting], prefixes: Mapping[str, Setting] | None = None
) -> None:
    """Hand each parameter to its setting; those that have none are told in the log. raises StatusError

    prefixes: settings of whatever begins so
    """
    for key, parameter in config.parameters.items():
        setting = settings.get(key) or next((f for p, f in (prefixes or {}).items() if key.startswith(p)), None)
        if setting is not None:
            setting(key, parameter.string_value)
        else:
            log.warning("model '%s': parameter '%s' changes nothing; %s", config.name, key, nearest(key, settings))


def number(config: ModelConfig, key: str, text: str, most: int = MOST_THREADS, least: int = 0) -> int:
    """raises StatusError"""
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most:
        return int(text)
    raise _unread(config, key, text, f"a number from {least} to {most}")


def flag(config: ModelConfig, key: str, text: str) -> bool:
    """raises StatusError"""
    if text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    raise _unread(config, key, text, "0 or 1")


def choice(config: ModelConfig, key: str, text: str, known: Sequence[str]) -> str:
    """raises StatusError"""
    if text.upper() in known:
        return text.upper()
    raise _unread(config, key, text, f"one of {', '.join(known)}")


def _unread(config: ModelConfig, key: str, text: str, expected: str) -> StatusError:
    return invalid(f"failed to parse parameter '{key}' of model '{config.name}': '{text:.40}', {expected} is expected")


# ---------------------------------------------------------------------- arrays


def texts(name: str, array: Array) -> Array:
    """BYTES as frameworks have them: an array of `str`. raises StatusError"""
    try:
        flat = [value.decode() for value in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}' holds bytes that are no UTF-8: {error}") from None
    found = np.empty(len(flat), np.object_)
    found[:] = flat
    return found.reshape(array.shape)


def encoded(array: Array) -> Array:
    """An array of texts as BYTES; any other as it is."""
    if array.dtype.kind not in "OUS":
        return array
    values = (v if isinstance(v, bytes) else str(v).encode() for v in array.reshape(-1).tolist())
    return objects(list(values)).reshape(array.shape)


def column_signature(config: ModelConfig, said: ModelOutput, told: ModelSignature) -> ModelSignature:
    """One number for each item, where the configuration has it as a column: `column` makes it one."""
    is_column = said.dims == (1,) and not said.reshape and told.dims == (-1,) and config.max_batch_size > 0
    return replace(told, dims=(-1, 1)) if is_column else told


def column(array: Array, config: ModelConfig, said: ModelOutput) -> Array:
    is_column = said.dims == (1,) and not said.reshape and array.ndim == 1 and config.max_batch_size > 0
    return array.reshape(-1, 1) if is_column else array


# ---------------------------------------------------------------------- the file and the configuration


def _seen(
    config: ModelConfig, inputs: Sequence[ModelSignature], outputs: Sequence[ModelSignature]
) -> tuple[list[ModelSignature], list[ModelSignature]]:
    """What clients of the network give and get, which is not all of it where it has sequences or ragged batches."""
    hidden = with_batch_inputs(whole(replace(config, input=(), output=())))
    gone = ({tensor.name for tensor in side} for side in (hidden.input, hidden.output))
    ours, theirs = (
        [t for t in side if t.name not in names] for side, names in zip((inputs, outputs), gone, strict=True)
    )
    return ours, theirs


def merge_signature(
    config: ModelConfig, inputs: Sequence[ModelSignature], outputs: Sequence[ModelSignature]
) -> ModelConfig:
    """With the inputs and outputs that it does not say, and, where it says none of them, batches. raises StatusError"""
    inputs, outputs = _seen(config, inputs, outputs)
    says_nothing = not config.input and not config.output and not config.max_batch_size
    if says_nothing and all(t.dims and t.dims[0] == -1 for t in (*inputs, *outputs)):
        config = replace(config, max_batch_size=DEFAULT_BATCH)
        if config.sequence_batching is None and config.dynamic_batching is None:
            batching = replace(empty(DynamicBatching), preferred_batch_size=(DEFAULT_BATCH,))
            config = replace(config, dynamic_batching=batching)
    has_batches = config.max_batch_size > 0
    return replace(
        config, input=config.input or tuple(_said(empty(ModelInput), t, has_batches) for t in inputs),
        output=config.output or tuple(_said(empty(ModelOutput), t, has_batches) for t in outputs),
    )  # fmt: skip


def _said(nothing: T, tensor: ModelSignature, has_batches: bool) -> T:
    """As a configuration says it. raises StatusError for a type that has no name there"""
    if not tensor.kind:
        what = f"tensor '{tensor.name}' has the type {tensor.shown or 'unknown'}, which is not supported"
        raise StatusError(Code.UNSUPPORTED, what)
    if tensor.dims is None:
        raise invalid(f"tensor '{tensor.name}' has any number of dimensions: say its dims in config.pbtxt")
    dims = tensor.dims[1:] if has_batches else tensor.dims
    if not dims:  # a configuration has no dims without a dimension
        nothing = replace(nothing, reshape=replace(empty(Reshape), shape=()))
    return replace(nothing, name=tensor.name, data_type=DataType[f"TYPE_{tensor.kind}"], dims=dims or (1,))


def check(
    config: ModelConfig,
    inputs: Sequence[ModelSignature],
    outputs: Sequence[ModelSignature],
    ragged: Ragged | None = None,
) -> None:
    """config: with all inputs and outputs of the network. ragged: of a backend that takes such batches

    raises StatusError where the configuration is not this file's
    """
    ragged = ragged or Ragged(replace(config, input=(), batch_input=(), batch_output=()))
    sides = ((config.input, inputs, "input"), (config.output, outputs, "output"))
    for said, there, side in sides:
        known = {tensor.name: tensor for tensor in there}
        if side == "input" and len(said) != len(there):
            what = f"unable to load model '{config.name}', configuration expects {len(said)} inputs"
            raise invalid(f"{what}, model provides {len(there)}")
        for one in said:
            if one.name not in known:
                names = ", ".join(known)
                raise invalid(f"unexpected inference {side} '{one.name}', allowed {side}s are: {names}")
            _check_type(config, one, known[one.name])
            if side == "input" and one.name in ragged.flat:
                _check_flat(config, known[one.name])
            elif one.name not in ragged.free:
                _check_shape(config, one, known[one.name])


def _check_flat(config: ModelConfig, there: ModelSignature) -> None:
    if there.dims not in ((-1,), None):
        what = "for ragged batches the shape should have one dimension, -1; but shape expected by the model is"
        raise invalid(f"model '{config.name}', tensor '{there.name}': {what} {list(there.dims)}")


def _check_type(config: ModelConfig, said: ModelInput | ModelOutput, there: ModelSignature) -> None:
    if there.kind is not None and f"TYPE_{there.kind}" != said.data_type.name:
        raise invalid(
            f"unable to load model '{config.name}', tensor '{said.name}': the model expects data-type "
            f"{there.kind or there.shown} but the model configuration specifies data-type {wire_name(said.data_type)}"
        )


def _check_shape(config: ModelConfig, said: ModelInput | ModelOutput, there: ModelSignature) -> None:
    if there.dims is None:
        return
    has_batches, dims = config.max_batch_size > 0, list(there.dims)
    shape = said.reshape.shape if said.reshape else said.dims
    full = [*([-1] if has_batches else []), *shape]
    if has_batches and dims[:1] not in ([], [-1]):
        raise invalid(
            f"model '{config.name}', tensor '{said.name}': for the model to support batching the shape should have at "
            f"least 1 dimension and the first dimension must be -1; but shape expected by the model is {dims}"
        )
    if len(full) != len(dims) or not all(a in (b, -1) or b == -1 for a, b in zip(full, dims, strict=True)):
        what = f"model '{config.name}', tensor '{said.name}': the model expects {len(dims)} dimensions (shape {dims})"
        what += f" but the model configuration specifies {len(full)} dimensions"
        batch = "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
        raise invalid(f"{what} ({batch}complete shape {full})" if has_batches else f"{what} (shape {full})")
