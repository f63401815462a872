"""Base of framework backends: external files and packages, threads, parameters, model signatures.

A backend reads the inputs and outputs of its file as `ModelSignatures`. `FrameworkBackend` completes the configuration
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
from millrace.model_repository.scheduling.ragged_batch import RaggedBatch, with_batch_inputs
from millrace.model_repository.scheduling.sequence_states import with_sequence_tensors

DEFAULT_BATCH = 4  # Triton's, for an empty configuration if all first dimensions are variable
MAX_THREADS = 4096
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_MAX_FILES = 10_000
Setting = Callable[[str, str], object]  # applies a parameter's key and text
T = TypeVar("T", ModelInput, ModelOutput)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """An input or output in the model file. kind: data type without TYPE_, "" if unsupported, None if unknown

    dims: with the batch dimension; -1 is any; None if unknown. shown: the framework's name of its type
    """

    name: str
    kind: str | None
    dims: tuple[int, ...] | None
    shown: str = ""


ModelSignatures = tuple[Sequence[TensorSignature], Sequence[TensorSignature]]  # inputs and outputs


# ---------------------------------------------------------------------- the backend and its instances


class FrameworkBackend(ModelBackend):
    """A backend for files that declare their inputs and outputs. file: default file name"""

    file = ""

    @abstractmethod
    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        """Read the inputs and outputs of a file. raises StatusError"""

    def complete_config(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """Complete inputs, outputs and, if neither is configured, batching from the file of the highest version."""
        config = replace(config, default_model_filename=config.default_model_filename or self.file)
        file = newest_file(folder, config.default_model_filename)
        if file is None or (config.input and config.output):
            return config
        return merge_signature(config, *self.signatures(config, file))


class FrameworkModel(BatchedInstance):
    """A loaded model. inner: the configuration with tensors that clients do not see, such as states"""

    def __init__(self, context: InstanceContext) -> None:
        """raises StatusError"""
        super().__init__(context)
        self.inner = with_batch_inputs(with_sequence_tensors(context.config))
        self._pace = Pace()
        refuse_accelerators(self.inner)

    def record_time(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        """Update the pace: a model quicker than a thread's wake-up runs in the event loop's thread."""
        self._pace.record(n_bytes, took_ns, cpu_ns)
        self.max_inline_bytes = self._pace.max_inline_bytes

    def check(self, inputs: Sequence[TensorSignature], outputs: Sequence[TensorSignature]) -> None:
        """Compare the configuration with the file. raises StatusError"""
        check_signatures(self.inner, inputs, outputs, self._ragged)


# ---------------------------------------------------------------------- what comes from outside


@cache
def import_package(name: str, extra: str = "") -> Any:
    """Import an optional package; extra: its extra, if named differently. raises StatusError if missing"""
    try:
        return import_module(name)
    except ImportError as error:
        extra = extra or name
        message = f"backend '{extra}' needs a package that cannot be imported: {error}"
        raise StatusError(Code.UNSUPPORTED, f"{message}; pip install 'millrace[{extra}]'") from None


@contextmanager
def framework_errors(framework: str) -> Iterator[None]:
    """Convert any exception of a framework to a StatusError."""
    try:
        yield
    except StatusError:
        raise
    except Exception as error:
        raise StatusError(Code.INTERNAL, f"{framework} error: {str(error) or type(error).__name__}") from error


def newest_file(folder: Path, name: str) -> Path | None:
    """Return the model file in the highest version that has one."""
    versions = [p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit() and (p / name).exists()]
    return max(versions, key=lambda p: int(p.name)) / name if versions else None


def check_size(file: Path, n_bytes: int | None = None) -> None:
    """Check that a file fits into memory before it is read. n_bytes: unpacked size; None: size of the file or folder

    raises StatusError, also if a link in the folder points outside of it
    """
    if n_bytes is None:
        n_bytes = file.stat().st_size if file.is_file() else _folder_bytes(file)
    if n_bytes > memory().total_bytes:
        message = f"{file.parent.name}/{file.name} has {n_bytes} bytes, more than this machine's memory"
        raise StatusError(Code.UNAVAILABLE, f"{message}, {memory().total_bytes} bytes")


def _folder_bytes(folder: Path) -> int:
    n_bytes = n_files = 0
    root = folder.resolve()
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            inner, n_files = Path(path, name), n_files + 1
            if n_files > _MAX_FILES:
                raise invalid(f"{folder.parent.name}/{folder.name} has more than {_MAX_FILES} files")
            if not inner.resolve().is_relative_to(root):
                raise invalid(f"{inner} is a link that leads out of the model's folder")
            n_bytes += inner.lstat().st_size
    return n_bytes


# ---------------------------------------------------------------------- what a configuration asks for


def n_threads(config: ModelConfig) -> int:
    """Return the threads per instance, so that all instances together use the machine's cores."""
    return max(1, usable_cores() // max(1, sum(group.count for group in config.instance_group)))


def refuse_accelerators(config: ModelConfig) -> None:
    accelerators = config.optimization.execution_accelerators if config.optimization else None
    if accelerators and accelerators.cpu_execution_accelerator:
        name = accelerators.cpu_execution_accelerator[0].name
        message = f"execution accelerator '{name}' of model '{config.name}' is not supported"
        raise StatusError(Code.UNSUPPORTED, message)


def set_parameters(
    config: ModelConfig, settings: Mapping[str, Setting], prefixes: Mapping[str, Setting] | None = None
) -> None:
    """Apply each parameter's setting; log parameters without one. raises StatusError

    prefixes: settings for keys by prefix
    """
    for key, parameter in config.parameters.items():
        setting = settings.get(key) or next((f for p, f in (prefixes or {}).items() if key.startswith(p)), None)
        if setting is not None:
            setting(key, parameter.string_value)
        else:
            log.warning("model '%s': parameter '%s' changes nothing; %s", config.name, key, nearest(key, settings))


def number(config: ModelConfig, key: str, text: str, max_value: int = MAX_THREADS, min_value: int = 0) -> int:
    """Parse a number. raises StatusError"""
    if text.isascii() and text.isdigit() and len(text) < 10 and min_value <= int(text) <= max_value:
        return int(text)
    raise _parse_error(config, key, text, f"a number from {min_value} to {max_value}")


def flag(config: ModelConfig, key: str, text: str) -> bool:
    """Parse a flag. raises StatusError"""
    if text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    raise _parse_error(config, key, text, "0 or 1")


def choice(config: ModelConfig, key: str, text: str, choices: Sequence[str]) -> str:
    """Parse one of `choices`. raises StatusError"""
    if text.upper() in choices:
        return text.upper()
    raise _parse_error(config, key, text, f"one of {', '.join(choices)}")


def _parse_error(config: ModelConfig, key: str, text: str, expected: str) -> StatusError:
    return invalid(f"failed to parse parameter '{key}' of model '{config.name}': '{text:.40}', {expected} is expected")


# ---------------------------------------------------------------------- arrays


def decode_texts(name: str, array: Array) -> Array:
    """Decode BYTES to an array of `str`. raises StatusError"""
    try:
        flat = [value.decode() for value in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}' holds bytes that are no UTF-8: {error}") from None
    decoded = np.empty(len(flat), np.object_)
    decoded[:] = flat
    return decoded.reshape(array.shape)


def encode_texts(array: Array) -> Array:
    """Encode an array of texts as BYTES; return other arrays unchanged."""
    if array.dtype.kind not in "OUS":
        return array
    values = (v if isinstance(v, bytes) else str(v).encode() for v in array.reshape(-1).tolist())
    return objects(list(values)).reshape(array.shape)


def column_signature(config: ModelConfig, output: ModelOutput, signature: TensorSignature) -> TensorSignature:
    """Return the signature of an output that `column` reshapes to (-1, 1), if the configuration declares it so."""
    is_column = output.dims == (1,) and not output.reshape and signature.dims == (-1,) and config.max_batch_size > 0
    return replace(signature, dims=(-1, 1)) if is_column else signature


def column(array: Array, config: ModelConfig, output: ModelOutput) -> Array:
    is_column = output.dims == (1,) and not output.reshape and array.ndim == 1 and config.max_batch_size > 0
    return array.reshape(-1, 1) if is_column else array


# ---------------------------------------------------------------------- the file and the configuration


def _client_signatures(
    config: ModelConfig, inputs: Sequence[TensorSignature], outputs: Sequence[TensorSignature]
) -> tuple[list[TensorSignature], list[TensorSignature]]:
    """Return the signatures without tensors hidden from clients: sequence controls, states, batch inputs."""
    hidden = with_batch_inputs(with_sequence_tensors(replace(config, input=(), output=())))
    gone = ({tensor.name for tensor in side} for side in (hidden.input, hidden.output))
    ours, theirs = (
        [t for t in side if t.name not in names] for side, names in zip((inputs, outputs), gone, strict=True)
    )
    return ours, theirs


def merge_signature(
    config: ModelConfig, inputs: Sequence[TensorSignature], outputs: Sequence[TensorSignature]
) -> ModelConfig:
    """Fill in missing inputs and outputs; enable batching if both are missing. raises StatusError"""
    inputs, outputs = _client_signatures(config, inputs, outputs)
    says_nothing = not config.input and not config.output and not config.max_batch_size
    if says_nothing and all(t.dims and t.dims[0] == -1 for t in (*inputs, *outputs)):
        config = replace(config, max_batch_size=DEFAULT_BATCH)
        if config.sequence_batching is None and config.dynamic_batching is None:
            batching = replace(empty(DynamicBatching), preferred_batch_size=(DEFAULT_BATCH,))
            config = replace(config, dynamic_batching=batching)
    has_batches = config.max_batch_size > 0
    return replace(
        config, input=config.input or tuple(_config_tensor(empty(ModelInput), t, has_batches) for t in inputs),
        output=config.output or tuple(_config_tensor(empty(ModelOutput), t, has_batches) for t in outputs),
    )  # fmt: skip


def _config_tensor(nothing: T, tensor: TensorSignature, has_batches: bool) -> T:
    """Convert a signature to a configuration's tensor. raises StatusError for an unsupported type"""
    if not tensor.kind:
        message = f"tensor '{tensor.name}' has the type {tensor.shown or 'unknown'}, which is not supported"
        raise StatusError(Code.UNSUPPORTED, message)
    if tensor.dims is None:
        raise invalid(f"tensor '{tensor.name}' has any number of dimensions: say its dims in config.pbtxt")
    dims = tensor.dims[1:] if has_batches else tensor.dims
    if not dims:  # a configuration's dims cannot be empty
        nothing = replace(nothing, reshape=replace(empty(Reshape), shape=()))
    return replace(nothing, name=tensor.name, data_type=DataType[f"TYPE_{tensor.kind}"], dims=dims or (1,))


def check_signatures(
    config: ModelConfig,
    inputs: Sequence[TensorSignature],
    outputs: Sequence[TensorSignature],
    ragged: RaggedBatch | None = None,
) -> None:
    """Compare a configuration with all tensors of the model. ragged: for backends that support ragged batches

    raises StatusError if they differ
    """
    ragged = ragged or RaggedBatch(replace(config, input=(), batch_input=(), batch_output=()))
    sides = ((config.input, inputs, "input"), (config.output, outputs, "output"))
    for declared, in_file, side in sides:
        by_name = {tensor.name: tensor for tensor in in_file}
        if side == "input" and len(declared) != len(in_file):
            message = f"unable to load model '{config.name}', configuration expects {len(declared)} inputs"
            raise invalid(f"{message}, model provides {len(in_file)}")
        for one in declared:
            if one.name not in by_name:
                names = ", ".join(by_name)
                raise invalid(f"unexpected inference {side} '{one.name}', allowed {side}s are: {names}")
            _check_type(config, one, by_name[one.name])
            if side == "input" and one.name in ragged.flat_inputs:
                _check_flat(config, by_name[one.name])
            elif one.name not in ragged.variable_tensors:
                _check_shape(config, one, by_name[one.name])


def _check_flat(config: ModelConfig, signature: TensorSignature) -> None:
    if signature.dims not in ((-1,), None):
        message = "for ragged batches the shape should have one dimension, -1; but shape expected by the model is"
        raise invalid(f"model '{config.name}', tensor '{signature.name}': {message} {list(signature.dims)}")


def _check_type(config: ModelConfig, declared: ModelInput | ModelOutput, signature: TensorSignature) -> None:
    if signature.kind is not None and f"TYPE_{signature.kind}" != declared.data_type.name:
        raise invalid(
            f"unable to load model '{config.name}', tensor '{declared.name}': the model expects data-type "
            f"{signature.kind or signature.shown} but the model configuration specifies data-type "
            f"{wire_name(declared.data_type)}"
        )


def _check_shape(config: ModelConfig, declared: ModelInput | ModelOutput, signature: TensorSignature) -> None:
    if signature.dims is None:
        return
    has_batches, dims = config.max_batch_size > 0, list(signature.dims)
    shape = declared.reshape.shape if declared.reshape else declared.dims
    full = [*([-1] if has_batches else []), *shape]
    if has_batches and dims[:1] not in ([], [-1]):
        raise invalid(
            f"model '{config.name}', tensor '{declared.name}': for the model to support batching the shape should have "
            f"at least 1 dimension and the first dimension must be -1; but shape expected by the model is {dims}"
        )
    if len(full) != len(dims) or not all(a in (b, -1) or b == -1 for a, b in zip(full, dims, strict=True)):
        message = (
            f"model '{config.name}', tensor '{declared.name}': the model expects {len(dims)} dimensions (shape {dims})"
        )
        message += f" but the model configuration specifies {len(full)} dimensions"
        batch = "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
        raise invalid(f"{message} ({batch}complete shape {full})" if has_batches else f"{message} (shape {full})")
