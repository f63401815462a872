"""Backend `identity`: each output equals the input at the same position of the configuration, of any datatype.

The parameter `execute_delay_ms` delays execution, as in Triton's own, to observe queueing and batching.
"""

import time
from collections.abc import Mapping

from millrace.model_repository.backends.backend import BatchedInstance, InstanceContext, ModelBackend
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.request.tensors import Array

_MAX_MS = 60_000


class _Identity(BatchedInstance):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        config = context.config
        if len(config.input) != len(config.output):
            raise invalid(f"model '{config.name}' has {len(config.input)} inputs and {len(config.output)} outputs")
        for i, o in zip(config.input, config.output, strict=True):
            if i.data_type is not o.data_type:
                raise invalid(f"output '{o.name}' has another data type than input '{i.name}'")
        self._pairs = [(i.name, o.name) for i, o in zip(config.input, config.output, strict=True)]
        self._delay_s = delay_s(context, "execute_delay_ms")
        self.max_inline_bytes = 0 if self._delay_s else 64 << 10

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if self._delay_s:
            time.sleep(self._delay_s)
        return {output: inputs[name] for name, output in self._pairs if name in inputs}


def delay_s(context: InstanceContext, name: str) -> float:
    """Return a millisecond parameter in seconds; 0 if it is not set. raises StatusError"""
    parameter = context.config.parameters.get(name)
    text = parameter.string_value if parameter else "0"
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) <= _MAX_MS):
        raise invalid(f"failed to parse parameter '{name}': a number of milliseconds up to {_MAX_MS} is expected")
    return int(text) / 1e3


class IdentityBackend(ModelBackend):
    def instance(self, context: InstanceContext) -> BatchedInstance:
        return _Identity(context)
