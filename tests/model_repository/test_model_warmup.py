"""Instances that compute samples before their model is ready: what they are given, and what goes wrong in it."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.execution import model_warmup
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from tests.support.loaded import Loaded
from tests.support.python_models import write
from tests.support.repository import REPEAT, write_models
from tests.support.sequences import SUMS, accumulator

CONFIG = """backend: "python" max_batch_size: 4 instance_group { count: 2 }
input { name: "N" data_type: TYPE_INT16 dims: [ 2 ] } input { name: "S" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "N" data_type: TYPE_INT16 dims: [ 2 ] }
"""
# What it was asked, a line a call.
TELLS = """
import json, threading
from pathlib import Path
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.log = Path(args["model_repository"]) / (args["model_instance_name"] + ".log")

    def execute(self, requests):
        inputs = [
            {t.name(): [x.decode() if isinstance(x, bytes) else float(x) for x in t.as_numpy().reshape(-1)]
             for t in r.inputs()} for r in requests
        ]
        with self.log.open("a") as log:
            log.write(json.dumps(inputs) + "\\n")
        return [pb_utils.InferenceResponse([pb_utils.get_input_tensor_by_name(r, "N")]) for r in requests]

    def finalize(self):
        self.log.with_suffix(".end").touch()
"""


def sample(n: str = "zero_data: true", s: str = "zero_data: true", more: str = "batch_size: 1") -> str:
    return f"""model_warmup {{ name: "w" {more}
      inputs {{ key: "N" value {{ data_type: TYPE_INT16 dims: [ 2 ] {n} }} }}
      inputs {{ key: "S" value {{ data_type: TYPE_STRING dims: [ 1 ] {s} }} }} }}"""


def logged(root: Path) -> list[list[Any]]:
    return [[json.loads(line) for line in log.read_text().splitlines()] for log in sorted((root / "m").glob("*.log"))]


async def refused(root: Path) -> str:
    repository = ModelRepository(RepositoryFlags(model_repository=(str(root),)))
    try:
        (line,) = await repository.start()
        return line
    finally:
        await repository.close(5.0)


def test_each_instance_computes_each_sample(tmp_path: Path) -> None:
    files = sample('input_data_file: "n"', 'input_data_file: "s"', "batch_size: 2 count: 3")
    write(tmp_path, "m", TELLS, CONFIG + sample() + files + sample(more="batch_size: 0"))
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "n").write_bytes(np.array([3, -4, 5], "<i2").tobytes())
    (tmp_path / "m" / "warmup" / "s").write_bytes(b"\2\0\0\0hi")

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            statistics = repository.get("m").statistics
            assert statistics.n_executions == 0 and statistics.stages["success"].count == 0

    asyncio.run(run())
    zeros, given = {"N": [0, 0], "S": [""]}, {"N": [3, -4], "S": ["hi"]}
    assert logged(tmp_path) == [[[zeros], *[[given, given]] * 3]] * 2


def test_random_data_and_samples_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"INT8": 1000, "BOOL": 1000, "FP16": 1000, "BF16": 1000, "UINT64": 1000}
    tensors = [f'name: "{k}" data_type: TYPE_{k} dims: [ {n} ]' for k, n in kinds.items()]
    sides = "".join(f"{side} {{ {t} }}" for t in tensors for side in ("input", "output"))
    warm = "".join(
        f'inputs {{ key: "{k}" value {{ data_type: TYPE_{k} dims: [ {n} ] random_data: true }} }}'
        for k, n in kinds.items()
    )  # fmt: skip
    samples = f'model_warmup {{ name: "w" batch_size: 1 {warm} }} model_warmup {{ name: "no" }}'
    write_models(tmp_path, {"m": f'backend: "identity" {sides} {samples}'})

    async def run() -> None:
        with caplog.at_level(logging.INFO, "millrace.model_repository.execution.model_warmup"):
            async with Loaded(tmp_path):
                pass

    asyncio.run(run())
    told = [record.message for record in caplog.records if record.name == model_warmup.__name__]
    assert told == [
        "m_0 is running warmup sample 'w'", "m_0: warmup sample 'no' has a batch size of 0, and is left out"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "warm", "says"),
    [
        (TELLS.replace("execute(self, requests):", "execute(self, requests):\n        raise ValueError('no')"),
         sample(), "Failed to process the request(s) for model instance 'm_0_0', message: ValueError: no"),
        (TELLS.replace("Response([", "Response(error=pb_utils.TritonError('bad')) or (["), sample(), "bad"),
        (TELLS, sample().replace("TYPE_INT16", "TYPE_INT32"), "inference input 'N' data-type is 'INT32'"),
        (TELLS, sample().replace('"S"', '"T"'), "unexpected inference input 'T' for model 'm'"),
        (TELLS, sample(s='input_data_file: "s"'), "warmup/s is not 1 strings, each behind its length in 4 bytes"),
    ],
)  # fmt: skip
def test_a_sample_that_fails_is_the_reason_why_nothing_is_served(
    tmp_path: Path, code: str, warm: str, says: str
) -> None:
    write(tmp_path, "m", code, CONFIG + warm)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "s").write_bytes(b"\3\0\0\0hi")
    line = asyncio.run(refused(tmp_path))
    assert line.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: ")
    assert "Invalid argument: failed to run warmup sample 'w': " in line
    assert says in line
    assert len(list((tmp_path / "m").glob("*.end"))) == 2, "instances that were made are ended"


def test_decoupled_models_and_models_of_sequences(tmp_path: Path) -> None:
    inputs = {"IN": "INT32", "DELAY": "UINT32", "WAIT": "UINT32"}
    warm = "".join(
        f'inputs {{ key: "{k}" value {{ data_type: TYPE_{kind} dims: [ 1 ] zero_data: true }} }}'
        for k, kind in inputs.items()
    )  # fmt: skip
    write_models(tmp_path, {"repeat": f'{REPEAT} model_warmup {{ name: "w" batch_size: 1 {warm} }}'})
    own = 'inputs { key: "CORRID" value { data_type: TYPE_UINT64 dims: [ 1 ] input_data_file: "id" } }'
    value = 'inputs { key: "INPUT" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }'
    config = accumulator() + f'model_warmup {{ name: "w" batch_size: 1 {value} {own} }}'
    write(tmp_path, "m", SUMS, config)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "id").write_bytes((77).to_bytes(8, "little"))

    async def run() -> None:
        async with Loaded(tmp_path):
            pass

    asyncio.run(run())
    assert logged(tmp_path) == [[[[77, 0, 1, 1, True]]]]
