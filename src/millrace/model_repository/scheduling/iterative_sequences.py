"""Iterative sequences: a model may reschedule a request, which is then computed again until it is answered.

Each request is its own sequence and occupies a slot meanwhile; further requests wait for a slot in order.
"""

import itertools
from collections import OrderedDict

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.infer_request import InferRequest

_START = 1  # Triton's flag of a sequence's first request
_FIRST_ID = 1 << 63  # generated correlation ids, beyond those that clients use


class Slots:
    def __init__(self, n: int) -> None:
        self._n = n
        self._active: set[InferRequest] = set()
        self._waiting: OrderedDict[InferRequest, None] = OrderedDict()
        self._ids = itertools.count(_FIRST_ID)

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Slots | None":
        """Return the slots of a completed configuration; None if it has no sequence batching."""
        batching = config.sequence_batching
        if batching is None:
            return None
        return cls((batching.oldest.max_candidate_sequences if batching.oldest else 0) or max(1, config.max_batch_size))

    def __len__(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    def acquire(self, request: InferRequest) -> bool:
        """Assign a slot to a request, or queue it; return whether it has a slot now."""
        request.flags = _START
        request.correlation_id = request.correlation_id or next(self._ids)
        if len(self._active) < self._n:
            self._active.add(request)
            return True
        self._waiting[request] = None
        return False

    def waits(self, request: InferRequest) -> bool:
        return request in self._waiting

    def release(self, request: InferRequest) -> InferRequest | None:
        """Free the slot of an ended request; return the waiting request that gets the slot."""
        if request not in self._active:
            self._waiting.pop(request, None)
            return None
        self._active.remove(request)
        if not self._waiting:
            return None
        following, _ = self._waiting.popitem(last=False)
        self._active.add(following)
        return following

    def waiting(self) -> list[InferRequest]:
        return list(self._waiting)
