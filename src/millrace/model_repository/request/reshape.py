"""Outputs that clients see in another shape than their model makes them: `reshape` of a configuration's outputs.

As Triton has it (`InferenceResponse::Output::Reshape` of its core): the model makes `reshape.shape`, clients are told
`dims`; the batch dimension, where there is one, stays, and the sizes of the -1 of one go to those of the other in turn.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from millrace.model_repository.config.config_rules import VARIABLE
from millrace.model_repository.config.model_config import ModelConfig, ModelOutput
from millrace.model_repository.repository.ensemble_tensor_check import is_compatible
from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.request_validation import shown
from millrace.model_repository.request.status_code import Code, StatusError


def backend_dims(said: ModelOutput) -> tuple[int, ...]:
    """As the model makes it, without the batch dimension; -1: any."""
    return said.dims if said.reshape is None else said.reshape.shape


class OutputReshaper:
    """Of one model; made once, and false where it reshapes nothing, as most do."""

    def __init__(self, config: ModelConfig) -> None:
        self._model, self._batch = config.name, 1 if config.max_batch_size else 0
        self._outputs = {said.name: said for said in config.output if said.reshape is not None}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def told(self, named: str, response: InferResponse) -> InferResponse:
        """As clients see it. named: the request, in front of an error. raises StatusError: it is of no such shape"""
        outputs = dict(response.outputs)
        for name, array in response.outputs.items():
            said = self._outputs.get(name)
            if said is None:
                continue
            batch, made = array.shape[: self._batch], array.shape[self._batch :]
            dims = _told_dims(said, made)
            if dims is None:
                expected = f"{shown(backend_dims(said))}, to be told as {shown(said.dims)}"
                what = f"output '{name}' of model '{self._model}' has shape {shown(made)}, expected {expected}"
                raise StatusError(Code.INTERNAL, f"{named}{what}")
            outputs[name] = array.reshape((*batch, *dims))
        return replace(response, outputs=outputs)


def _told_dims(said: ModelOutput, made: tuple[int, ...]) -> tuple[int, ...] | None:
    """None: nothing tells them. A model may make what clients are told, too, or whatever has as many elements."""
    if is_compatible(backend_dims(said), made):
        variable: Iterator[int] = (n for s, n in zip(backend_dims(said), made, strict=True) if s == VARIABLE)
        return tuple(next(variable) if s == VARIABLE else s for s in said.dims)
    if is_compatible(said.dims, made):
        return made
    return said.dims if VARIABLE not in said.dims and prod(said.dims) == prod(made) else None
