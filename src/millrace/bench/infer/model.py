"""What a server tells of a model: inputs and outputs, batches, instances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.errors import ConfigError, MachineError, sanitize
from millrace.model_repository.request.tensors import DTYPES, MOST_DIMENSIONS, MOST_ELEMENTS

_MOST = 2**31 - 1  # of a batch and of instances, as Triton's configuration has them


@dataclass(frozen=True, slots=True)
class Spec:
    """shape: of one item, without the batch; -1: as long as one likes"""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """max_batch: items of a request at most, 0 where it takes no batches, None where the server does not say how many;
    instances: how many run at a time, and where, "" where it does not say"""

    name: str
    version: str
    platform: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    max_batch: int | None
    instances: str = ""

    @property
    def batched(self) -> bool:
        return self.max_batch != 0

    def check_batch(self, size: int) -> None:
        """raises ConfigError"""
        if size > 1 and not self.batched:
            raise ConfigError(f'--batch-size {size}: "{self.name}" takes no batches', "1", "leave it out")
        if self.max_batch is not None and self.batched and size > self.max_batch:
            raise ConfigError(
                f'--batch-size {size} for "{self.name}"', f"at most {self.max_batch}, its max_batch_size", "lower it"
            )

    def shaped(self, shapes: Mapping[str, tuple[int, ...]], free_ends: bool = False) -> "Model":
        """With the shapes that the user gives. free_ends: shapes come with the data. raises ConfigError"""
        known = {spec.name: spec for spec in self.inputs}
        for name in shapes:
            if name not in known:
                raise ConfigError(f'--shape of "{name}"', f"an input: {', '.join(known)}", "correct the name")
        return replace(self, inputs=tuple(_shaped(spec, shapes.get(spec.name), free_ends) for spec in self.inputs))


def _shaped(spec: Spec, shape: tuple[int, ...] | None, free_ends: bool) -> Spec:
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


def told_model(metadata: Mapping[str, Any], config: Mapping[str, Any] | None) -> Model:
    """From KServe's metadata, and Triton's configuration where there is one. raises MachineError

    Without a configuration, a first dimension of -1 in every input is taken for the batch.
    """
    try:
        inputs, outputs = (tuple(map(_spec, metadata.get(key) or ())) for key in ("inputs", "outputs"))
        name, versions = _text(metadata["name"]), [_text(v) for v in metadata.get("versions") or ()]
        platform = _text(metadata.get("platform") or (config or {}).get("backend") or "")
        if config is None:
            max_batch = None if inputs and all(spec.shape[:1] == (-1,) for spec in inputs) else 0
        else:
            max_batch = whole(config.get("max_batch_size", 0), 0, _MOST)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_model(f"{type(error).__name__}: {error}") from None
    if max_batch != 0:
        inputs, outputs = (tuple(replace(s, shape=s.shape[1:]) for s in specs) for specs in (inputs, outputs))
    if not inputs:
        raise _no_model("no inputs")
    version = versions[-1] if versions else ""
    return Model(name, version, platform, inputs, outputs, max_batch, _instances(config))


def _spec(told: Mapping[str, Any]) -> Spec:
    """Its name as it is, since it is sent back."""
    shape = tuple(whole(d, -1, MOST_ELEMENTS) for d in told["shape"])
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    if told["datatype"] not in DTYPES:
        raise ValueError(f"the datatype {told['datatype']!s:.80}")
    name = told["name"]
    if not isinstance(name, str):
        raise TypeError("a name that is no text")
    name.encode()  # raises UnicodeEncodeError, a ValueError, for half of a character
    return Spec(name, str(told["datatype"]), shape)


def _text(told: Any) -> str:
    """To be shown. raises TypeError"""
    if not isinstance(told, str | int):
        raise TypeError(f"{type(told).__name__} where a text was expected")
    return sanitize(str(told))


def whole(told: Any, low: int, high: int) -> int:
    """A number that a server tells, as JSON's or as protobuf's text. raises ValueError, TypeError"""
    try:
        n = int(told)
    except OverflowError:  # 1e999
        raise ValueError(f"the number {told}") from None
    if not low <= n <= high:
        raise ValueError(f"a number that is not from {low} to {high}")
    return n


def _no_model(why: str) -> MachineError:
    return MachineError(f"the model's metadata cannot be read ({why})", "KServe's: name, inputs, outputs", "ask curl")


def _instances(config: Mapping[str, Any] | None) -> str:
    """`2 on CPU`: what the groups of a configuration add up to; one of GPUs has its count on each of them."""
    found: dict[str, int] = {}
    try:
        for group in (config or {}).get("instance_group") or ():
            kind = _text(group.get("kind", "KIND_AUTO")).removeprefix("KIND_")
            n = whole(group.get("count", 1), 0, _MOST)
            found[kind] = found.get(kind, 0) + n * max(1, len(group.get("gpus") or ()))
    except (TypeError, ValueError, AttributeError):
        return ""
    return ", ".join(f"{n} on {kind}" for kind, n in found.items())
