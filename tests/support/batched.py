"""What every backend of networks must do with sequences, and with requests of different shapes."""

import asyncio
from pathlib import Path

import numpy as np

from millrace.serve.inference.check import Given
from millrace.serve.inference.model import Model
from millrace.serve.inference.request import InferRequest
from tests.support.loaded import Loaded, infer


async def sums_of(model: Model, id_: int) -> None:
    """`model`: y = all x of its sequence so far, [1, 2]; who = the sequence's id. Clients see nothing else of it"""
    assert [i.name for i in model.config.input] == ["x"]
    total = np.zeros((1, 2), np.float32)
    for i in range(4):
        x = np.random.default_rng((id_, i)).integers(0, 9, (1, 2)).astype(np.float32)
        total += x
        request = InferRequest({})
        request.correlation_id, request.flags = id_, (i == 0) | (i == 3) << 1
        model.checker.take(request, [Given("x", "FP32", x.shape, x)])
        outputs = (await model.infer(request)).outputs
        assert outputs.keys() == {"y", "who"} and outputs["who"].tolist() == [[id_]]
        assert np.array_equal(outputs["y"], total)


async def ragged_of(root: Path) -> None:
    """Model "sums": of each request the sum of its elements, and each element twice; four are one batch."""
    xs = [np.random.default_rng(n).integers(0, 9, (1, n)).astype(np.float32) for n in (1, 7, 3, 4)]
    async with Loaded(root) as repository:
        found = await asyncio.gather(*(infer(repository, "sums", x=x) for x in xs))
        for x, one in zip(xs, found, strict=True):
            assert np.array_equal(one["sum"], [[x.sum()]]) and np.array_equal(one["twice"], x * 2)
        assert repository.get("sums").statistics.by_size.keys() == {4}, "all in one"
        alone = await infer(repository, "sums", x=xs[1])
        assert np.array_equal(alone["sum"], [[xs[1].sum()]]) and np.array_equal(alone["twice"], xs[1] * 2)
