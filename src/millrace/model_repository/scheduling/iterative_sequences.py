"""Iterative sequences: a request that its model sends back is computed again, and again, until it is answered.

Each is a sequence of its own and holds a slot meanwhile; further ones wait for a slot, in their order.
"""

import itertools
from collections import OrderedDict

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.infer_request import InferRequest

_START = 1  # Triton's flag of a sequence's first request
_FIRST_ID = 1 << 63  # of those that say no correlation id: beyond what clients count


class Slots:
    def __init__(self, n: int) -> None:
        self._n = n
        self._held: set[InferRequest] = set()
        self._waiting: OrderedDict[InferRequest, None] = OrderedDict()
        self._ids = itertools.count(_FIRST_ID)

    @classmethod
    def of(cls, config: ModelConfig) -> "Slots | None":
        """config: completed; None: its requests are no sequences"""
        said = config.sequence_batching
        if said is None:
            return None
        return cls((said.oldest.max_candidate_sequences if said.oldest else 0) or max(1, config.max_batch_size))

    def __len__(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def enter(self, request: InferRequest) -> bool:
        """Whether it has a slot now."""
        request.flags = _START
        request.correlation_id = request.correlation_id or next(self._ids)
        if len(self._held) < self._n:
            self._held.add(request)
            return True
        self._waiting[request] = None
        return False

    def waits(self, request: InferRequest) -> bool:
        return request in self._waiting

    def leave(self, request: InferRequest) -> InferRequest | None:
        """It has ended; the next that has a slot now."""
        if request not in self._held:
            self._waiting.pop(request, None)
            return None
        self._held.remove(request)
        if not self._waiting:
            return None
        following, _ = self._waiting.popitem(last=False)
        self._held.add(following)
        return following

    def waiting(self) -> list[InferRequest]:
        return list(self._waiting)
