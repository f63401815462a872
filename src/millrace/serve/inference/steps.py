"""The steps of an ensemble: which tensors each takes and makes, and whether they fit the models that compute them.

Words are Triton's. That each tensor is made once, and by what is there before, `repository/ensembles.py` has seen to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from millrace.serve.inference.model import Model
from millrace.serve.inference.status import Code, StatusError, invalid
from millrace.serve.repository.config import EnsembleScheduling, ModelConfig, ModelInput, ModelOutput
from millrace.serve.repository.kinds import DataType


@dataclass(frozen=True, slots=True)
class Step:
    """inputs, outputs: the model's name of a tensor, and the ensemble's. version: None is the highest"""

    model: str
    version: int | None
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def takes(self) -> frozenset[str]:
        return frozenset(tensor for _, tensor in self.inputs)


def steps_of(scheduling: EnsembleScheduling) -> tuple[Step, ...]:
    return tuple(
        Step(
            said.model_name, said.model_version if said.model_version > 0 else None,
            tuple(said.input_map.items()), tuple(said.output_map.items()),
        )
        for said in scheduling.step
    )  # fmt: skip


class Flow:
    """Which steps need which, by their places."""

    def __init__(self, steps: Sequence[Step]) -> None:
        makers = {tensor: i for i, step in enumerate(steps) for _, tensor in step.outputs}
        self._makers = makers
        self.before = tuple(frozenset(makers[t] for t in step.takes if t in makers) for step in steps)
        behind: list[set[int]] = [set() for _ in steps]
        for i, needs in enumerate(self.before):
            for maker in needs:
                behind[maker].add(i)
        self.behind = tuple(map(frozenset, behind))

    def after(self, first: int) -> frozenset[int]:
        """The steps that need what step `first` makes, also by way of others."""
        return _reached(self.behind[first], self.behind)

    def needed(self, outputs: Iterable[str]) -> frozenset[int]:
        """The steps without which these tensors do not come to be."""
        return _reached((self._makers[t] for t in outputs if t in self._makers), self.before)


def _reached(begin: Iterable[int], edges: Sequence[Iterable[int]]) -> frozenset[int]:
    left = list(begin)
    found = set(left)
    while left:
        new = [i for i in edges[left.pop()] if i not in found]
        found.update(new)
        left.extend(new)
    return frozenset(found)


# ---------------------------------------------------------------------- whether they fit


class _Said(NamedTuple):
    """What one model says of a tensor. shape: with its batch dimension; -1 is any"""

    by: str
    datatype: DataType
    shape: tuple[int, ...]


def check_steps(config: ModelConfig, members: Mapping[Step, Model]) -> None:
    """Whether the models of the steps take, and make, what the ensemble says. raises StatusError"""
    said: dict[str, _Said] = {}
    for given in config.input:
        _agree(config.name, said, given.name, _reshaped(config, given))
    for asked in config.output:
        _agree(config.name, said, asked.name, _of(config, asked))
    for step, member in members.items():
        other = member.config
        if config.max_batch_size > other.max_batch_size > 0:
            raise invalid(
                f"ensemble '{config.name}' allows maximum batch size {config.max_batch_size}, but it contains model "
                f"'{other.name}' which only allows maximum batch size to be {other.max_batch_size}"
            )
        inputs, outputs = {t.name: t for t in other.input}, {t.name: t for t in other.output}
        for (key, tensor), there, word in _mapped(step, inputs, outputs):
            if key not in there:
                what = f"in ensemble {config.name}, ensemble tensor {tensor} is mapping to non-existing {word} {key}"
                raise invalid(f"{what} in model {other.name}")
            _agree(config.name, said, tensor, _of(other, there[key]))
        missing = [name for name, i in inputs.items() if not i.optional and name not in dict(step.inputs)]
        if missing:
            what = f"in ensemble {config.name}, input {missing[0]} in model {other.name} is not mapped to"
            raise invalid(f"{what} any ensemble tensor")
    _one_decoupled(config.name, members)


def _mapped(
    step: Step, inputs: Mapping[str, ModelInput], outputs: Mapping[str, ModelOutput]
) -> Iterator[tuple[tuple[str, str], Mapping[str, ModelInput] | Mapping[str, ModelOutput], str]]:
    yield from ((pair, inputs, "input") for pair in step.inputs)
    yield from ((pair, outputs, "output") for pair in step.outputs)


def _reshaped(config: ModelConfig, tensor: ModelInput) -> _Said:
    """An input of the ensemble as its steps get it."""
    return _of(config, tensor if tensor.reshape is None else replace(tensor, dims=tensor.reshape.shape))


def _of(config: ModelConfig, tensor: ModelInput | ModelOutput) -> _Said:
    return _Said(config.name, tensor.data_type, (*((-1,) if config.max_batch_size > 0 else ()), *tensor.dims))


def _agree(ensemble: str, said: dict[str, _Said], tensor: str, new: _Said) -> None:
    old = said.setdefault(tensor, new)
    where = f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent"
    if old.datatype is not new.datatype:
        raise invalid(
            f"{where} data type: {old.datatype.name} is inferred from model {old.by} while {new.datatype.name} is "
            f"inferred from model {new.by}"
        )
    both = list(zip(old.shape, new.shape, strict=False))
    if len(old.shape) != len(new.shape) or any(a != b and -1 not in (a, b) for a, b in both):
        raise invalid(
            f"{where} shape: {list(old.shape)} is inferred from model {old.by} while {list(new.shape)} is inferred "
            f"from model {new.by}"
        )
    if (-1) in old.shape:  # the next is compared with what is known of it by now
        said[tensor] = old._replace(shape=tuple(b if a == -1 else a for a, b in both))


def _one_decoupled(ensemble: str, members: Mapping[Step, Model]) -> None:
    decoupled = [step.model for step, member in members.items() if member.is_decoupled]
    if len(decoupled) > 1:
        what = f"ensemble '{ensemble}' has {len(decoupled)} decoupled models, {', '.join(decoupled)}"
        raise StatusError(Code.UNSUPPORTED, f"{what}; at most one is supported")


def find_members(ensemble: str, steps: Iterable[Step], get: Callable[[str, int | None], Model]) -> dict[Step, Model]:
    """The loaded model of each step. raises StatusError where one is not loaded"""
    found: dict[Step, Model] = {}
    for step in steps:
        try:
            found[step] = get(step.model, step.version)
        except StatusError as error:
            version = f" version {step.version}" if step.version is not None else ""
            what = f"ensemble '{ensemble}' depends on '{step.model}'{version} which has no loaded version"
            raise invalid(f"{what}: {error}") from None
    return found
