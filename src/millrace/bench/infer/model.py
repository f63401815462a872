"""Description of a tensor model from the server's metadata: inputs, outputs, batching, instances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.errors import ConfigError, MachineError, sanitize
from millrace.model_repository.request.tensors import DTYPES, MAX_DIMENSIONS, MAX_ELEMENTS

_MAX_INT = 2**31 - 1  # limit of batch sizes and instances in Triton's configuration


@dataclass(frozen=True, slots=True)
class BenchTensor:
    """An input or output. shape: without the batch dimension; -1: any length"""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A tensor model. max_batch: largest batch, 0 without batching, None if unknown

    instances: number and device kinds, "" if unknown
    """

    name: str
    version: str
    platform: str
    inputs: tuple[BenchTensor, ...]
    outputs: tuple[BenchTensor, ...]
    max_batch: int | None
    instances: str = ""

    @property
    def batched(self) -> bool:
        return self.max_batch != 0

    def check_batch(self, size: int) -> None:
        """Refuse batch sizes that the model does not take. raises ConfigError"""
        if size > 1 and not self.batched:
            raise ConfigError(f'--batch-size {size}: "{self.name}" takes no batches', "1", "leave it out")
        if self.max_batch is not None and self.batched and size > self.max_batch:
            raise ConfigError(
                f'--batch-size {size} for "{self.name}"', f"at most {self.max_batch}, its max_batch_size", "lower it"
            )

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]], free_ends: bool = False) -> "BenchModel":
        """Set the shapes given by the user. free_ends: shapes come with the data. raises ConfigError"""
        by_name = {spec.name: spec for spec in self.inputs}
        for name in shapes:
            if name not in by_name:
                raise ConfigError(f'--shape of "{name}"', f"an input: {', '.join(by_name)}", "correct the name")
        return replace(self, inputs=tuple(_with_shape(spec, shapes.get(spec.name), free_ends) for spec in self.inputs))


def _with_shape(spec: BenchTensor, shape: tuple[int, ...] | None, free_ends: bool) -> BenchTensor:
    if shape is not None:
        fits = len(shape) == len(spec.shape) and all(a in (-1, b) for a, b in zip(spec.shape, shape, strict=True))
        if not fits:
            expected = f"{dims(spec.shape)} of one item, -1 being any length"
            raise ConfigError(f"--shape {spec.name}:{dims(shape)}", expected, "correct it")
        return replace(spec, shape=shape)
    if -1 in spec.shape and not free_ends:
        raise ConfigError(
            f'input "{spec.name}" has the shape {dims(spec.shape)}, -1 being any length', "a length for each",
            f"--shape {spec.name}:{dims([16 if d == -1 else d for d in spec.shape])}",
        )  # fmt: skip
    return spec


def dims(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def parse_model(metadata: Mapping[str, Any], config: Mapping[str, Any] | None) -> BenchModel:
    """Parse KServe's metadata, and Triton's configuration if there is one. raises MachineError

    Without a configuration, a first dimension of -1 in every input is taken as the batch.
    """
    try:
        inputs, outputs = (tuple(map(_spec, metadata.get(key) or ())) for key in ("inputs", "outputs"))
        name, versions = _text(metadata["name"]), [_text(v) for v in metadata.get("versions") or ()]
        platform = _text(metadata.get("platform") or (config or {}).get("backend") or "")
        if config is None:
            max_batch = None if inputs and all(spec.shape[:1] == (-1,) for spec in inputs) else 0
        else:
            max_batch = bounded_int(config.get("max_batch_size", 0), 0, _MAX_INT)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_model(f"{type(error).__name__}: {error}") from None
    if max_batch != 0:
        inputs, outputs = (tuple(replace(s, shape=s.shape[1:]) for s in specs) for specs in (inputs, outputs))
    if not inputs:
        raise _no_model("no inputs")
    version = versions[-1] if versions else ""
    return BenchModel(name, version, platform, inputs, outputs, max_batch, _instances(config))


def _spec(tensor: Mapping[str, Any]) -> BenchTensor:
    """Parse an input or output; its name is kept verbatim because it is sent back."""
    shape = tuple(bounded_int(d, -1, MAX_ELEMENTS) for d in tensor["shape"])
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    if tensor["datatype"] not in DTYPES:
        raise ValueError(f"the datatype {tensor['datatype']!s:.80}")
    name = tensor["name"]
    if not isinstance(name, str):
        raise TypeError("a name that is no text")
    name.encode()  # raises UnicodeEncodeError, a ValueError, for half of a character
    return BenchTensor(name, str(tensor["datatype"]), shape)


def _text(value: Any) -> str:
    """Sanitise a string for output. raises TypeError"""
    if not isinstance(value, str | int):
        raise TypeError(f"{type(value).__name__} where a text was expected")
    return sanitize(str(value))


def bounded_int(value: Any, low: int, high: int) -> int:
    """Convert a number of a server, from JSON or protobuf's text form. raises ValueError, TypeError"""
    try:
        n = int(value)
    except OverflowError:  # 1e999
        raise ValueError(f"the number {value}") from None
    if not low <= n <= high:
        raise ValueError(f"a number that is not from {low} to {high}")
    return n


def _no_model(reason: str) -> MachineError:
    return MachineError(
        f"the model's metadata cannot be read ({reason})", "KServe's: name, inputs, outputs", "ask curl"
    )


def _instances(config: Mapping[str, Any] | None) -> str:
    """Format the total instances of all groups as `2 on CPU`; a GPU group has its count on each GPU."""
    counts: dict[str, int] = {}
    try:
        for group in (config or {}).get("instance_group") or ():
            kind = _text(group.get("kind", "KIND_AUTO")).removeprefix("KIND_")
            n = bounded_int(group.get("count", 1), 0, _MAX_INT)
            counts[kind] = counts.get(kind, 0) + n * max(1, len(group.get("gpus") or ()))
    except (TypeError, ValueError, AttributeError):
        return ""
    return ", ".join(f"{n} on {kind}" for kind, n in counts.items())
