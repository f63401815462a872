"""Reshaping of outputs for clients, as `reshape` of a configuration's outputs demands.

As in Triton (`InferenceResponse::Output::Reshape` in its core), the model produces `reshape.shape` and clients get
`dims`. A batch dimension is kept, and the sizes of variable dims (-1) are assigned in order.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from millrace.model_repository.config.config_rules import VARIABLE
from millrace.model_repository.config.model_config import ModelConfig, ModelOutput
from millrace.model_repository.repository.ensemble_tensor_check import is_compatible
from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.request_validation import format_shape
from millrace.model_repository.request.status_code import Code, StatusError


def backend_dims(output: ModelOutput) -> tuple[int, ...]:
    """Return the dims that the model produces, without the batch dimension; -1 is any."""
    return output.dims if output.reshape is None else output.reshape.shape


class OutputReshaper:
    """Reshaper of one model's outputs; false if it reshapes nothing, like most models."""

    def __init__(self, config: ModelConfig) -> None:
        self._model, self._batch = config.name, 1 if config.max_batch_size else 0
        self._outputs = {output.name: output for output in config.output if output.reshape is not None}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def reshape(self, prefix: str, response: InferResponse) -> InferResponse:
        """Return the response in the client's shapes. named: prefix of errors. raises StatusError for a wrong shape"""
        outputs = dict(response.outputs)
        for name, array in response.outputs.items():
            output = self._outputs.get(name)
            if output is None:
                continue
            batch, shape = array.shape[: self._batch], array.shape[self._batch :]
            dims = _client_dims(output, shape)
            if dims is None:
                expected = f"{format_shape(backend_dims(output))}, to be told as {format_shape(output.dims)}"
                message = (
                    f"output '{name}' of model '{self._model}' has shape {format_shape(shape)}, expected {expected}"
                )
                raise StatusError(Code.INTERNAL, f"{prefix}{message}")
            outputs[name] = array.reshape((*batch, *dims))
        return replace(response, outputs=outputs)


def _client_dims(output: ModelOutput, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the client's dims; None if undetermined. A model may also produce these dims, or as many elements."""
    if is_compatible(backend_dims(output), shape):
        variable: Iterator[int] = (n for s, n in zip(backend_dims(output), shape, strict=True) if s == VARIABLE)
        return tuple(next(variable) if s == VARIABLE else s for s in output.dims)
    if is_compatible(output.dims, shape):
        return shape
    return output.dims if VARIABLE not in output.dims and prod(output.dims) == prod(shape) else None
