"""Serialises load and unload per model; different models change concurrently."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import Code, StatusError

_MAX_CHANGES = 16  # pending changes of one model


@dataclass(slots=True)
class _ModelLock:
    """Lock of one model. n: changes in progress or waiting"""

    n: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class ModelLocks:
    """Locks of all models of one event loop."""

    def __init__(self) -> None:
        self._locks: dict[ModelId, _ModelLock] = {}  # of models that are changing

    def __len__(self) -> int:
        return len(self._locks)

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._locks

    def find_by_name(self, name: str) -> list[ModelId]:
        return [model_id for model_id in self._locks if model_id.name == name]

    async def wait_released(self, model_id: ModelId) -> None:
        """Wait until no change of the model is in progress or waiting."""
        model_lock = self._locks.get(model_id)
        if model_lock is not None:
            await model_lock.is_over.wait()

    @asynccontextmanager
    async def hold(self, model_id: ModelId) -> AsyncIterator[None]:
        """Hold the lock of a model. raises StatusError if too many changes wait"""
        model_lock = self._locks.setdefault(model_id, _ModelLock())
        if model_lock.n >= _MAX_CHANGES:
            raise StatusError(
                Code.UNAVAILABLE, f"{model_lock.n} changes of model '{model_id}' wait for one that is under way"
            )
        model_lock.n += 1
        try:
            async with model_lock.lock:
                yield
        finally:
            model_lock.n -= 1
            if not model_lock.n:
                del self._locks[model_id]
                model_lock.is_over.set()
