"""A repository of tensor models in an event loop, without a server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.tensors import Array
from tests.support.repository import identity

BATCHES = identity("FP32", "1", "max_batch_size: 8 %s", "")


class Loaded:
    """A repository in an event loop."""

    def __init__(self, root: Path, common: RepositoryContext | None = None, **flags: Any) -> None:
        self.repository = ModelRepository(RepositoryFlags(model_repository=(str(root),), **flags), common)

    async def __aenter__(self) -> ModelRepository:
        assert await self.repository.start() == []
        return self.repository

    async def __aexit__(self, *_: object) -> None:
        await self.repository.close(5.0)


def refused(root: Path) -> list[str]:
    """Why its models are not served."""

    async def run() -> list[str]:
        repository = ModelRepository(RepositoryFlags(model_repository=(str(root),)))
        failed = list(await repository.start())
        await repository.close(1)
        return failed

    return asyncio.run(run())


async def infer(repository: ModelRepository, name: str, /, **inputs: Array) -> dict[str, Array]:
    """What the model answers to inputs of the types that it declares."""
    model, request = repository.get(name), InferRequest({})
    kinds = {i.name: i.data_type.name.removeprefix("TYPE_").replace("STRING", "BYTES") for i in model.config.input}
    model.checker.attach_inputs(request, [RawInput(key, kinds[key], x.shape, x) for key, x in inputs.items()])
    return dict((await model.infer(request)).outputs)


def asked(model: Model, *values: float, datatype: str = "FP32") -> InferRequest:
    request = InferRequest({})
    data = np.array(values, dtype=np.float32).reshape(-1, 1)
    model.checker.attach_inputs(request, [RawInput("INPUT0", datatype, data.shape, data)])
    return request


async def becomes(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.01)
