"""The steps of an ensemble: which tensors each takes and makes, and whether they fit the models that compute them.

Words are Triton's. `repository/fit.py` knows what fits; that each tensor is made once, and by what is there before,
`repository/ensembles.py` has seen to.
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


class EnsembleGraph:
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

    def maker(self, tensor: str) -> int | None:
        """The step that makes it; None: it is an input of the ensemble."""
        return self._makers.get(tensor)

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


def rebatched(array: Array, dims: Sequence[int], *, has_batch: bool, wants_batch: bool) -> Array:
    """A tensor as its taker has it, where one of taker and maker has batches. dims: the taker's, without the batch's

    As Triton does it: what has these dims already becomes a batch of one; a batch of one without them is one no more.
    """
    if has_batch == wants_batch:
        return array
    is_whole = is_compatible(dims, array.shape)
    if wants_batch:
        return array[np.newaxis] if is_whole else array
    return array if is_whole or array.shape[:1] != (1,) else array.reshape(array.shape[1:])


# ---------------------------------------------------------------------- whether they fit


def check_steps(of: ModelId, config: ModelConfig, members: Sequence[Model]) -> None:
    """Whether the models of the steps take, and make, what the ensemble says. raises StatusError"""
    steps = [(ModelId(member.namespace, member.name), member.config) for member in members]
    for broken in tensor_mismatches(of, config, steps):
        raise invalid(broken.what)
    _one_decoupled(of, members)


def _one_decoupled(of: ModelId, members: Sequence[Model]) -> None:
    decoupled = [member.name for member in members if member.is_decoupled]
    if len(decoupled) > 1:
        what = f"ensemble '{of}' has {len(decoupled)} decoupled models, {', '.join(decoupled)}"
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
