"""How much memory the instances of a model hold, as its statistics have it."""

import logging
from collections.abc import Sequence
from typing import Any

from millrace.serve.inference.instances import Worker

log = logging.getLogger(__name__)


class MemoryUsage:
    """Of one model. A failure of an instance is logged once, however often it is asked for."""

    def __init__(self, name: str, version: int, workers: Sequence[Worker]) -> None:
        self._name, self._version, self._workers = name, version, workers
        self._has_failed = False

    def told(self) -> list[dict[str, Any]]:
        """Triton's `memory_usage`. Empty if an instance fails to report: the sum of the others would pass for all."""
        try:
            held = [n_bytes for worker in self._workers if (n_bytes := worker.memory_bytes()) is not None]
        except BaseException as error:  # a backend may raise anything; whoever asks asks of other models, too
            if not self._has_failed:
                log.warning("%s version %d: its memory is not told", self._name, self._version, exc_info=error)
            self._has_failed = True
            return []
        return [{"type": "CPU", "id": 0, "byte_size": sum(held)}] if held else []
