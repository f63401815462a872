"""A request in process: `Model` driven without any protocol, beside its arithmetic alone."""

import asyncio
import time
from pathlib import Path

import uvloop

from benchmarks.tensors.request import NAME, inputs, outputs
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.infer_request import InferRequest

N = 20_000


def in_process(repository: Path, rounds: int) -> list[dict[str, float]]:
    """Microseconds of CPU a request, and of the arithmetic it is about; one of each a round."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_in_process(repository, rounds))


async def _in_process(root: Path, rounds: int) -> list[dict[str, float]]:
    repository = ModelRepository(RepositoryFlags(model_repository=(str(root),)))
    assert await repository.start() == []
    model = repository.get(NAME)
    response = await model.infer(_request())
    assert tuple(array.tobytes() for array in response.outputs.values()) == outputs()
    await _asked(model)  # warms up
    found = [{"request_us": await _asked(model), "backend_us": _computed()} for _ in range(rounds)]
    await repository.close(1)
    return found


def _request() -> InferRequest:
    left, right = inputs()
    request = InferRequest({"INPUT0": left, "INPUT1": right})
    request.batch_size = 1
    return request


async def _asked(model: Model) -> float:
    left, right = inputs()
    began = time.process_time()
    for _ in range(N):
        request = InferRequest({"INPUT0": left, "INPUT1": right})
        request.batch_size = 1
        await model.infer(request)
    return (time.process_time() - began) / N * 1e6


def _computed() -> float:
    left, right = inputs()
    began = time.process_time()
    for _ in range(N):
        _ = {"OUTPUT0": left + right, "OUTPUT1": left - right}
    return (time.process_time() - began) / N * 1e6
