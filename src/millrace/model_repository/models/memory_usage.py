"""Memory usage of one model, as its statistics report it."""

import logging
from collections.abc import Sequence
from typing import Any

from millrace.model_repository.execution.instance_worker import InstanceWorker

log = logging.getLogger(__name__)


class MemoryUsage:
    """The memory usage of one model. The first failure of an instance to report is logged, later ones are not."""

    def __init__(self, name: str, version: int, workers: Sequence[InstanceWorker]) -> None:
        self._name, self._version, self._workers = name, version, workers
        self._has_failed = False

    def report(self) -> list[dict[str, Any]]:
        """Return Triton's `memory_usage`; empty if an instance fails to report, because a partial sum would mislead."""
        try:
            sizes = [n_bytes for worker in self._workers if (n_bytes := worker.memory_bytes()) is not None]
        except BaseException as error:  # a backend may raise anything; other models are still reported
            if not self._has_failed:
                log.warning("%s version %d: its memory usage is unknown", self._name, self._version, exc_info=error)
            self._has_failed = True
            return []
        return [{"type": "CPU", "id": 0, "byte_size": sum(sizes)}] if sizes else []
