"""BodyLimiter of `generate` that nobody would write: each is read, or refused in words; nothing else."""

import json
import random
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.model_repository.config.pbtxt_binder import read_config
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import DTYPES
from millrace.serve.protocols.kserve.http.generate_extension import read_generate

KEYS = ("A", "A", "A", "B", "id", "parameters", "sequence_id", "priority", "timeout", "headers", "triton_x", "x", "")
VALUES = (
    0, 1, -1, 255, 256, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30, 1.5, 1e400, "a", "\ud800", "", True, False, None,
    "ü" * 50,
)  # fmt: skip


@dataclass
class Known:
    """As much of a model as reading a body needs."""

    checker: RequestValidator
    name: str = "m"
    version: int = 1


def known(max_batch: int, dims: str, datatype: str) -> Model:
    text = f"""name: "m" max_batch_size: {max_batch} input {{ name: "A" data_type: TYPE_{datatype} dims: [ {dims} ] }}
    input {{ name: "B" data_type: TYPE_STRING dims: [ -1 ] optional: true }}
    output {{ name: "O" data_type: TYPE_FP32 dims: [ 1 ] }}"""
    return cast(Model, Known(RequestValidator(read_config(text.encode(), Path("config.pbtxt")).config)))


MODELS = [
    (datatype, known(max_batch, dims, datatype if datatype != "BYTES" else "STRING"))
    for max_batch in (0, 4)
    for dims in ("1", "-1", "-1, 2", "-1, -1", "2, 3")
    for datatype in ("FP32", "INT8", "UINT64", "BYTES", "BOOL", "FP16", "FP64")
]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.3 and depth < 4:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    if kind < 0.4 and depth < 4:
        return {rng.choice(("A", "B", "\ud800", "x")): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    if kind < 0.5:
        return [rng.choice((0, 1, 1.0, "a", True))] * rng.randint(0, 12)
    return rng.choice(VALUES)


def body(rng: random.Random) -> bytes:
    told = {"A": value(rng), **{rng.choice(KEYS): value(rng) for _ in range(rng.randint(0, 3))}}
    made = bytearray(json.dumps(told, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass"))
    for _ in range(rng.randint(1, 3) if rng.random() < 0.2 else 0):
        made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


@pytest.mark.parametrize("n", [3000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_every_body_is_read_or_refused(n: int) -> None:
    rng, n_read = random.Random(n), 0
    for _ in range(n):
        datatype, model = rng.choice(MODELS)
        try:
            request = read_generate(body(rng), model)
        except StatusError as error:
            assert error.message
            continue
        n_read += 1
        array = request.inputs["A"]
        assert array.dtype == DTYPES[datatype] and array.size == prod(array.shape)
        assert json.dumps(request.parameters) and request.id.encode() is not None
    assert n_read > n / 50, "some of them are right"
