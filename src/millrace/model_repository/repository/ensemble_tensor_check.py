"""Whether the tensors of an ensemble are those of the models that its steps are: names, data types, shapes, batches.

Asked of configurations alone: before a load of those that are whole already, at a load of all. Words are Triton's. That
each tensor is made once, and by an earlier step, `ensemble_rules.py` has checked. The shapes of a batching model and of
one without batches agree if they do with or without the batch dimension.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from millrace.model_repository.config.config_rules import VARIABLE, RuleViolation
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.model_config import ModelConfig, ModelInput, ModelOutput, Step
from millrace.model_repository.config.pbtxt_binder import Path_
from millrace.model_repository.repository.model_names import ModelId

_TOP = "ensemble_scheduling"
_Shape = tuple[int, ...]


class _TensorSpec(NamedTuple):
    """What one model says of a tensor. dims: without its batch dimension, where it has one; VARIABLE is any"""

    by: ModelId
    datatype: DataType
    dims: _Shape
    has_batch: bool

    @property
    def shape(self) -> _Shape:
        return (VARIABLE, *self.dims) if self.has_batch else self.dims


# The model of each step; None where only a load tells what it takes and makes.
Steps = Sequence[tuple[ModelId, ModelConfig] | None]


def tensor_mismatches(of: ModelId, config: ModelConfig, steps: Steps) -> Iterator[RuleViolation]:
    """Of an ensemble, with the model of each of its steps."""
    scheduling = config.ensemble_scheduling
    assert scheduling is not None, of
    said: dict[str, _TensorSpec] = {}
    for given in config.input:
        said[given.name] = _inside(of, config, given)
    for asked in config.output:
        said.setdefault(asked.name, _inside(of, config, asked))
    for i, (step, known) in enumerate(zip(scheduling.step, steps, strict=True)):
        if known is not None:
            yield from _of_step(of, config, step, known, said, (_TOP, "step", i))


def _of_step(
    of: ModelId, config: ModelConfig, step: Step, known: tuple[ModelId, ModelConfig], said: dict[str, _TensorSpec],
    at: Path_,
) -> Iterator[RuleViolation]:  # fmt: skip
    member, theirs = known
    if config.max_batch_size > theirs.max_batch_size > 0:
        what = f"ensemble {of} allows maximum batch size {config.max_batch_size}, but it contains model {member} which "
        what += f"only allows maximum batch size to be {theirs.max_batch_size}"
        yield RuleViolation(("max_batch_size",), what, f"at most {theirs.max_batch_size}", "correct one of them")
    inputs, outputs = {t.name: t for t in theirs.input}, {t.name: t for t in theirs.output}
    where = f"in ensemble {of}, ensemble tensor"
    sides: tuple[tuple[str, Mapping[str, str], Mapping[str, ModelInput | ModelOutput], str], ...] = (
        ("input_map", step.input_map, inputs, "is mapping to non-existing input"),
        ("output_map", step.output_map, outputs, "is mapped from non-existing output"),
    )
    for field, mapped, there, word in sides:
        for key, tensor in mapped.items():
            path = (*at, field, key)
            if key not in there:
                expected = f"one of: {', '.join(there)}"
                yield RuleViolation(
                    path, f"{where} {tensor} {word} {key} in model {member}", expected, "correct the key"
                )
            else:
                yield from _agree(f"{where} {tensor}", said, tensor, _of(member, theirs, there[key]), path)
        if field == "input_map":
            for name in (name for name, one in inputs.items() if not one.optional and name not in mapped):
                what = f"in ensemble {of}, input {name} in model {member} is not mapped to any ensemble tensors"
                yield RuleViolation(at, what, f'input_map {{ key: "{name}" value: ... }}', "map it")


def _inside(of: ModelId, config: ModelConfig, tensor: ModelInput | ModelOutput) -> _TensorSpec:
    """Of an ensemble's own, as its steps see it."""
    return _of(of, config, tensor if tensor.reshape is None else replace(tensor, dims=tensor.reshape.shape))


def _of(by: ModelId, config: ModelConfig, tensor: ModelInput | ModelOutput) -> _TensorSpec:
    return _TensorSpec(by, tensor.data_type, tensor.dims, config.max_batch_size > 0)


def _agree(
    where: str, said: dict[str, _TensorSpec], tensor: str, new: _TensorSpec, path: Path_
) -> Iterator[RuleViolation]:
    old = said.setdefault(tensor, new)
    if old.datatype is not new.datatype:
        what = f"{where}: inconsistent data type: {old.datatype.name} is inferred from model {old.by} while "
        what += f"{new.datatype.name} is inferred from model {new.by}"
        yield RuleViolation(path, what, "the same data type in both", "correct one of them, or put a step between")
        return
    if old.dims == new.dims:
        return
    if is_compatible(old.dims, new.dims):
        dims = _known(old.dims, new.dims)
    elif is_compatible(old.shape, new.shape):
        dims = _known(old.shape, new.shape)[1 if old.has_batch else 0 :]
    else:
        what = f"{where}: inconsistent shape: {_shown(old.shape)} is inferred from model {old.by} while "
        what += f"{_shown(new.shape)} is inferred from model {new.by}"
        yield RuleViolation(
            path, what, "the same shape in both, -1 for any", "correct one of them, or put a step between"
        )
        return
    if dims != old.dims:  # the next is compared with what is known of it by now
        said[tensor] = _TensorSpec(new.by, old.datatype, dims, old.has_batch)


def is_compatible(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether there is a shape that both are; VARIABLE is any."""
    return len(one) == len(other) and all(a == b or VARIABLE in (a, b) for a, b in zip(one, other, strict=True))


def _known(one: _Shape, other: _Shape) -> _Shape:
    """What two that fit say together."""
    return tuple(b if a == VARIABLE else a for a, b in zip(one, other, strict=True))


def _shown(shape: _Shape) -> str:
    return f"[{','.join(map(str, shape))}]"
