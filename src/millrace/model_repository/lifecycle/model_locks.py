"""Changes of models: of each one at a time, of different ones any number; none looks at what another is served from."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import Code, StatusError

_MOST_CHANGES = 16  # of one model that wait for their turn


@dataclass(slots=True)
class _ModelLock:
    """n: changes of one model that are made or wait"""

    n: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class ModelLocks:
    """Of one event loop."""

    def __init__(self) -> None:
        self._of: dict[ModelId, _ModelLock] = {}  # of the models that are being changed

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, one: ModelId) -> bool:
        return one in self._of

    def named(self, name: str) -> list[ModelId]:
        return [one for one in self._of if one.name == name]

    async def over(self, one: ModelId) -> None:
        """Until nobody changes it."""
        turn = self._of.get(one)
        if turn is not None:
            await turn.is_over.wait()

    @asynccontextmanager
    async def of(self, one: ModelId) -> AsyncIterator[None]:
        """raises StatusError where too many wait"""
        turn = self._of.setdefault(one, _ModelLock())
        if turn.n >= _MOST_CHANGES:
            raise StatusError(Code.UNAVAILABLE, f"{turn.n} changes of model '{one}' wait for one that is under way")
        turn.n += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.n -= 1
            if not turn.n:
                del self._of[one]
                turn.is_over.set()
