"""Steps of an ensemble: their tensors, their order, and whether they fit the models that compute them.

Error texts are Triton's. `repository/ensemble_tensor_check.py` compares tensors. `config/ensemble_rules.py` has checked
that each tensor is produced once, by an earlier step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.model_repository.config.model_config import EnsembleScheduling, ModelConfig
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.ensemble_tensor_check import is_compatible, tensor_mismatches
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A step. inputs, outputs: pairs of the model's and the ensemble's tensor name. version: None is the highest"""

    model: str
    version: int | None
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def takes(self) -> frozenset[str]:
        return frozenset(tensor for _, tensor in self.inputs)


def steps_from_config(scheduling: EnsembleScheduling) -> tuple[EnsembleStep, ...]:
    return tuple(
        EnsembleStep(
            step_config.model_name, step_config.model_version if step_config.model_version > 0 else None,
            tuple(step_config.input_map.items()), tuple(step_config.output_map.items()),
        )
        for step_config in scheduling.step
    )  # fmt: skip


class EnsembleGraph:
    """Dependencies between steps, by step index."""

    def __init__(self, steps: Sequence[EnsembleStep]) -> None:
        producers = {tensor: i for i, step in enumerate(steps) for _, tensor in step.outputs}
        self._producers = producers
        self.predecessors = tuple(frozenset(producers[t] for t in step.takes if t in producers) for step in steps)
        successors: list[set[int]] = [set() for _ in steps]
        for i, needs in enumerate(self.predecessors):
            for producer in needs:
                successors[producer].add(i)
        self.successors = tuple(map(frozenset, successors))

    def producer(self, tensor: str) -> int | None:
        """Return the step that produces a tensor; None for an input of the ensemble."""
        return self._producers.get(tensor)

    def after(self, first: int) -> frozenset[int]:
        """Return all direct and indirect successors of step `first`."""
        return _reachable(self.successors[first], self.successors)

    def needed(self, outputs: Iterable[str]) -> frozenset[int]:
        """Return the steps needed to produce these tensors."""
        return _reachable((self._producers[t] for t in outputs if t in self._producers), self.predecessors)


def _reachable(begin: Iterable[int], edges: Sequence[Iterable[int]]) -> frozenset[int]:
    left = list(begin)
    reached = set(left)
    while left:
        new = [i for i in edges[left.pop()] if i not in reached]
        reached.update(new)
        left.extend(new)
    return frozenset(reached)


def rebatched(array: Array, dims: Sequence[int], *, has_batch: bool, wants_batch: bool) -> Array:
    """Add or remove a batch dimension of 1 if producer and consumer differ. dims: the consumer's, without the batch

    As in Triton, a tensor that already has these dims gets the dimension; a batch of one that lacks them loses it.
    """
    if has_batch == wants_batch:
        return array
    is_unbatched = is_compatible(dims, array.shape)
    if wants_batch:
        return array[np.newaxis] if is_unbatched else array
    return array if is_unbatched or array.shape[:1] != (1,) else array.reshape(array.shape[1:])


# ---------------------------------------------------------------------- whether they fit


def check_steps(ensemble: ModelId, config: ModelConfig, members: Sequence[Model]) -> None:
    """Check that the models of the steps have the ensemble's tensors. raises StatusError"""
    steps = [(ModelId(member.namespace, member.name), member.config) for member in members]
    for broken in tensor_mismatches(ensemble, config, steps):
        raise invalid(broken.what)
    _check_decoupled(ensemble, members)


def _check_decoupled(ensemble: ModelId, members: Sequence[Model]) -> None:
    decoupled = [member.name for member in members if member.is_decoupled]
    if len(decoupled) > 1:
        message = f"ensemble '{ensemble}' has {len(decoupled)} decoupled models, {', '.join(decoupled)}"
        raise StatusError(Code.UNSUPPORTED, f"{message}; at most one is supported")


def find_members(
    ensemble: str, steps: Iterable[EnsembleStep], get: Callable[[str, int | None], Model]
) -> dict[EnsembleStep, Model]:
    """Return the loaded model of each step. raises StatusError if one is not loaded"""
    members: dict[EnsembleStep, Model] = {}
    for step in steps:
        try:
            members[step] = get(step.model, step.version)
        except StatusError as error:
            version = f" version {step.version}" if step.version is not None else ""
            message = f"ensemble '{ensemble}' depends on '{step.model}'{version} which has no loaded version"
            raise invalid(f"{message}: {error}") from None
    return members
