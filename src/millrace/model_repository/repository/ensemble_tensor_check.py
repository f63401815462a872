"""Check of an ensemble's tensors against the models of its steps: names, data types, shapes, batching.

Works on configurations: before a load on those known to be complete, at a load on all. Messages are Triton's.
`ensemble_rules.py` has checked that each tensor is produced once, by an earlier step. Shapes of a batching and a
non-batching model agree if they match with or without the batch dimension.
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
    """A tensor as declared by one model. dims: without the batch dimension; VARIABLE is any"""

    model: ModelId
    datatype: DataType
    dims: _Shape
    has_batch: bool

    @property
    def shape(self) -> _Shape:
        return (VARIABLE, *self.dims) if self.has_batch else self.dims


# The model of each step; None if only a load reveals its tensors.
Steps = Sequence[tuple[ModelId, ModelConfig] | None]


def tensor_mismatches(ensemble: ModelId, config: ModelConfig, steps: Steps) -> Iterator[RuleViolation]:
    """Yield mismatches between an ensemble and the models of its steps."""
    scheduling = config.ensemble_scheduling
    assert scheduling is not None, ensemble
    specs: dict[str, _TensorSpec] = {}
    for input_tensor in config.input:
        specs[input_tensor.name] = _inside(ensemble, config, input_tensor)
    for output_tensor in config.output:
        specs.setdefault(output_tensor.name, _inside(ensemble, config, output_tensor))
    for i, (step, step_model) in enumerate(zip(scheduling.step, steps, strict=True)):
        if step_model is not None:
            yield from _step_mismatches(ensemble, config, step, step_model, specs, (_TOP, "step", i))


def _step_mismatches(
    ensemble: ModelId, config: ModelConfig, step: Step, step_model: tuple[ModelId, ModelConfig],
    specs: dict[str, _TensorSpec], at: Path_,
) -> Iterator[RuleViolation]:  # fmt: skip
    member, member_config = step_model
    if config.max_batch_size > member_config.max_batch_size > 0:
        message = f"ensemble {ensemble} allows maximum batch size {config.max_batch_size}, but it contains model "
        message += f"{member} which only allows maximum batch size to be {member_config.max_batch_size}"
        yield RuleViolation(
            ("max_batch_size",), message, f"at most {member_config.max_batch_size}", "correct one of them"
        )
    inputs, outputs = {t.name: t for t in member_config.input}, {t.name: t for t in member_config.output}
    where = f"in ensemble {ensemble}, ensemble tensor"
    sides: tuple[tuple[str, Mapping[str, str], Mapping[str, ModelInput | ModelOutput], str], ...] = (
        ("input_map", step.input_map, inputs, "is mapping to non-existing input"),
        ("output_map", step.output_map, outputs, "is mapped from non-existing output"),
    )
    for field, mapped, member_tensors, word in sides:
        for key, tensor in mapped.items():
            path = (*at, field, key)
            if key not in member_tensors:
                expected = f"one of: {', '.join(member_tensors)}"
                yield RuleViolation(
                    path, f"{where} {tensor} {word} {key} in model {member}", expected, "correct the key"
                )
            else:
                yield from _agree(
                    f"{where} {tensor}", specs, tensor, _tensor_spec(member, member_config, member_tensors[key]), path
                )
        if field == "input_map":
            for name in (name for name, one in inputs.items() if not one.optional and name not in mapped):
                message = (
                    f"in ensemble {ensemble}, input {name} in model {member} is not mapped to any ensemble tensors"
                )
                yield RuleViolation(at, message, f'input_map {{ key: "{name}" value: ... }}', "map it")


def _inside(ensemble: ModelId, config: ModelConfig, tensor: ModelInput | ModelOutput) -> _TensorSpec:
    """Return an ensemble's own tensor as its steps see it."""
    return _tensor_spec(
        ensemble, config, tensor if tensor.reshape is None else replace(tensor, dims=tensor.reshape.shape)
    )


def _tensor_spec(model: ModelId, config: ModelConfig, tensor: ModelInput | ModelOutput) -> _TensorSpec:
    return _TensorSpec(model, tensor.data_type, tensor.dims, config.max_batch_size > 0)


def _agree(
    prefix: str, specs: dict[str, _TensorSpec], tensor: str, new: _TensorSpec, path: Path_
) -> Iterator[RuleViolation]:
    old = specs.setdefault(tensor, new)
    if old.datatype is not new.datatype:
        message = f"{prefix}: inconsistent data type: {old.datatype.name} is inferred from model {old.model} while "
        message += f"{new.datatype.name} is inferred from model {new.model}"
        yield RuleViolation(path, message, "the same data type in both", "correct one of them, or put a step between")
        return
    if old.dims == new.dims:
        return
    if is_compatible(old.dims, new.dims):
        dims = _merge_dims(old.dims, new.dims)
    elif is_compatible(old.shape, new.shape):
        dims = _merge_dims(old.shape, new.shape)[1 if old.has_batch else 0 :]
    else:
        message = f"{prefix}: inconsistent shape: {_format_shape(old.shape)} is inferred from model {old.model} while "
        message += f"{_format_shape(new.shape)} is inferred from model {new.model}"
        yield RuleViolation(
            path, message, "the same shape in both, -1 for any", "correct one of them, or put a step between"
        )
        return
    if dims != old.dims:  # later steps are compared with the merged shape
        specs[tensor] = _TensorSpec(new.model, old.datatype, dims, old.has_batch)


def is_compatible(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return whether both shapes can match the same tensor; VARIABLE is any."""
    return len(left) == len(right) and all(a == b or VARIABLE in (a, b) for a, b in zip(left, right, strict=True))


def _merge_dims(left: _Shape, right: _Shape) -> _Shape:
    """Merge two compatible shapes, replacing variable dims of the first."""
    return tuple(b if a == VARIABLE else a for a, b in zip(left, right, strict=True))


def _format_shape(shape: _Shape) -> str:
    return f"[{','.join(map(str, shape))}]"
