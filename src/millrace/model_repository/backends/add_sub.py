"""Backend `add_sub`: OUTPUT0 is the sum of two inputs, OUTPUT1 their difference; the example of Triton's tutorials."""

from collections.abc import Mapping

from millrace.model_repository.backends.backend import BatchedInstance, InstanceContext, ModelBackend
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.request.tensors import Array

_NOT_NUMBERS = (DataType.TYPE_STRING, DataType.TYPE_BOOL, DataType.TYPE_INVALID)


class _AddSub(BatchedInstance):
    max_inline_bytes = 64 << 10

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        tensors = [(t.data_type, t.dims) for side in (context.config.input, context.config.output) for t in side]
        kinds = {data_type for data_type, _ in tensors}
        if (len(context.config.input), len(context.config.output)) != (2, 2) or len({dims for _, dims in tensors}) != 1:
            raise invalid(f"model '{context.config.name}' must have two inputs and two outputs of the same dims")
        if len(kinds) != 1 or kinds & set(_NOT_NUMBERS):
            raise invalid(f"model '{context.config.name}' must have inputs and outputs of one type of numbers")
        self._left, self._right = (t.name for t in context.config.input)
        self._sum, self._difference = (t.name for t in context.config.output)

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        left, right = inputs[self._left], inputs[self._right]
        if left.shape != right.shape:  # broadcasting could exceed any memory
            raise invalid(f"inputs of shapes {list(left.shape)} and {list(right.shape)}: expected the same of both")
        return {self._sum: left + right, self._difference: left - right}


class AddSubBackend(ModelBackend):
    def instance(self, context: InstanceContext) -> BatchedInstance:
        return _AddSub(context)
