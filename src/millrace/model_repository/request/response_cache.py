"""Response cache for models whose configuration enables it, bounded in bytes and evicted least recently used first.

A key consists of the loaded model, a 256-bit digest of the inputs (names, types, shapes, bytes), the requested outputs
and everything else that a model sees of a request except its id. Everything runs in the event loop.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.tensors import Array, memory_bytes
from millrace.settings import parse_size

FLAG = "--cache-config"
_EACH_BYTES = 512  # approximate overhead of an entry besides its tensors
Key = tuple[object, ...]


@dataclass(slots=True)
class _CachedResponse:
    response: InferResponse
    n_bytes: int


class LocalResponseCache:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self._entries: OrderedDict[Key, _CachedResponse] = OrderedDict()

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> "LocalResponseCache | None":
        """Parse `local,size=N`, as in Triton; None without flags. raises ConfigError"""
        if not flags:
            return None
        expected, fix = "local,size=BYTES", "write it so, for one local,size=64M"
        name, _, setting = flags[0].partition(",")
        key, _, value = setting.partition("=")
        if len(flags) > 1 or name != "local" or key != "size" or not value:
            raise ConfigError(f"{FLAG} is {' and '.join(flags)!r:.100}", expected, fix)
        max_bytes = parse_size(value, "cache-config")
        if max_bytes < 1:
            raise ConfigError(f"{FLAG} has a size of {max_bytes}", "at least one byte", fix)
        return cls(max_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> InferResponse | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.response

    def put(self, key: Key, response: InferResponse) -> None:
        """Store a read-only copy, unless it is larger than the whole cache."""
        n_bytes = _EACH_BYTES + memory_bytes(response.outputs.values())
        if n_bytes > self.max_bytes:
            return
        self._drop(key)
        while self.n_bytes + n_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
        outputs = {name: _copied(array) for name, array in response.outputs.items()}
        self._entries[key] = _CachedResponse(InferResponse(outputs, dict(response.parameters)), n_bytes)
        self.n_bytes += n_bytes

    def remove_model(self, model: object) -> None:
        """Remove the entries of an unloaded model. model: the first element of its keys"""
        for key in [key for key in self._entries if key[0] == model]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.n_bytes -= entry.n_bytes


def cache_key(model: object, request: InferRequest) -> Key:
    """Return the cache key of a request. model: a value that changes with each load"""
    options = tuple(sorted(request.parameters.items())), request.correlation_id, request.flags
    types = tuple(type(value) for _, value in options[0])  # because True, 1 and 1.0 compare equal
    return model, request.digest, request.outputs, *options, types


def input_digest(inputs: Mapping[str, Array]) -> bytes:
    """Return a digest of the inputs. Each part is length-prefixed, so that the encoding is unambiguous."""
    digest = hashlib.blake2b(digest_size=32)
    for name, array in sorted(inputs.items()):
        head = f"{name}\0{array.dtype}\0{array.shape}".encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        if array.dtype == np.object_:
            for value in array.reshape(-1):
                data = value if isinstance(value, bytes) else str(value).encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _copied(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy
