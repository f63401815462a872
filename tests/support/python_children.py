"""Models in processes of their own, and what a test waits for."""

import asyncio
from collections.abc import Callable

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.python_backend.python_process import StubInstance


def child_of(repository: ModelRepository, name: str) -> StubInstance:
    model = repository.get(name)
    assert isinstance(model, BackendModel)
    instance = model._workers[0]._instance
    assert isinstance(instance, StubInstance)
    return instance


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)


async def load(repository: ModelRepository, *names: str) -> None:
    await asyncio.gather(*(repository.load(name) for name in names))


SLEEPS = """
    def execute(self, requests):
        import os, signal, time
        word = requests[0].inputs()[0].as_numpy()[0].decode()
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return [said(str(os.getpid())) for request in requests]
"""
