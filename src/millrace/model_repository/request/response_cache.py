"""Answers that were given before: the response cache of models whose configuration asks for it, bounded by its bytes.

A key is the model as it is loaded, a digest of 256 bits of the inputs (names, types, shapes, bytes), the outputs that
are asked for and what else a model sees of a request but its id. Least recently used answers go first. Of the event
loop.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.tensors import Array, held_bytes
from millrace.settings import parse_size

FLAG = "--cache-config"
_EACH_BYTES = 512  # about what an answer takes beside its tensors
Key = tuple[object, ...]


@dataclass(slots=True)
class _CachedResponse:
    response: InferResponse
    n_bytes: int


class ResponseCache:
    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.n_bytes = most_bytes, 0
        self._kept: OrderedDict[Key, _CachedResponse] = OrderedDict()

    @classmethod
    def of(cls, said: Sequence[str]) -> "ResponseCache | None":
        """`local,size=N`, as Triton has it; None where nothing is said. raises ConfigError"""
        if not said:
            return None
        expected, mend = "local,size=BYTES", "write it so, for one local,size=64M"
        name, _, setting = said[0].partition(",")
        key, _, value = setting.partition("=")
        if len(said) > 1 or name != "local" or key != "size" or not value:
            raise ConfigError(f"{FLAG} is {' and '.join(said)!r:.100}", expected, mend)
        most_bytes = parse_size(value, "cache-config")
        if most_bytes < 1:
            raise ConfigError(f"{FLAG} has a size of {most_bytes}", "at least one byte", mend)
        return cls(most_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def look(self, key: Key) -> InferResponse | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found.response

    def keep(self, key: Key, response: InferResponse) -> None:
        """A copy, which nobody can write into; what is larger than all of it is not kept."""
        n_bytes = _EACH_BYTES + held_bytes(response.outputs.values())
        if n_bytes > self.most_bytes:
            return
        self._drop(key)
        while self.n_bytes + n_bytes > self.most_bytes:
            self._drop(next(iter(self._kept)))
        outputs = {name: _copied(array) for name, array in response.outputs.items()}
        self._kept[key] = _CachedResponse(InferResponse(outputs, dict(response.parameters)), n_bytes)
        self.n_bytes += n_bytes

    def forget(self, model: object) -> None:
        """What a model answered that is unloaded. model: the first of its keys"""
        for key in [key for key in self._kept if key[0] == model]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self.n_bytes -= found.n_bytes


def key_of(model: object, request: InferRequest) -> Key:
    """model: what is another thing once it is loaded anew"""
    said = tuple(sorted(request.parameters.items())), request.correlation_id, request.flags
    types = tuple(type(value) for _, value in said[0])  # True, 1 and 1.0 are equal, and other parameters
    return model, request.digest, request.outputs, *said, types


def digest_of(inputs: Mapping[str, Array]) -> bytes:
    """Each part is behind its length: no two requests are one text."""
    found = hashlib.blake2b(digest_size=32)
    for name, array in sorted(inputs.items()):
        head = f"{name}\0{array.dtype}\0{array.shape}".encode()
        found.update(len(head).to_bytes(8, "little") + head)
        if array.dtype == np.object_:
            for value in array.reshape(-1):
                data = value if isinstance(value, bytes) else str(value).encode()
                found.update(len(data).to_bytes(8, "little") + data)
        else:
            found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()


def _copied(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy
