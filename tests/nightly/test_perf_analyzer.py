"""Triton's load generator in C++, the last that was published for pip, drives a served repository.

It reads metadata, configuration and statistics, sends its own tensors, and ends with an error where any of these is not
as Triton has it.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.ensembles import ensemble
from tests.support.python_models import write
from tests.support.repository import REPEAT, in_process, write_models
from tests.support.sequences import SUMS, accumulator
from tests.support.server import Threaded

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
PROGRAM = Path(sys.prefix) / "bin" / "perf_analyzer"  # of the wheel tritonclient==2.44.0
_SIDE = '[ {{ name: "{0}0" data_type: TYPE_FP32 dims: [ 16 ] }}, {{ name: "{0}1" data_type: TYPE_FP32 dims: [ 16 ] }} ]'
ADD_SUB = f"""backend: "add_sub" max_batch_size: 8
input {_SIDE.format("INPUT")}
output {_SIDE.format("OUTPUT")}
dynamic_batching {{ max_queue_delay_microseconds: 200 }}
"""
PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(*(tensor.as_numpy() for tensor in request.inputs())) for request in requests]

    def answer(self, a, b):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)])
"""
LLM = 'backend: "millrace" parameters { key: "model" value { string_value: "tiny" } }'
# What decoupled models are asked: three responses; eight tokens, as they come.
ASKED: dict[str, dict[str, Any]] = {
    "repeat": {"IN": {"content": [4, 5, 6], "shape": [3]}, "DELAY": {"content": [0, 0, 0], "shape": [3]}, "WAIT": [0]},
    "llm": {"text_input": ["Once upon a time"], "max_tokens": [8], "stream": [True], "ignore_eos": [True]},
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folders of what it links beside the system's: CUDA's runtime, as a wheel has it, and libb64, as Debian does."""
    found = find_spec("nvidia.cuda_runtime") if find_spec("nvidia") else None
    if not PROGRAM.is_file() or found is None or not found.submodule_search_locations:
        pytest.skip("perf_analyzer is not installed")
    folder = tmp_path_factory.mktemp("libb64")
    subprocess.run(["apt-get", "download", "libb64-0d"], cwd=folder, check=True, capture_output=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    (b64,) = folder.rglob("libb64.so*")
    return f"{found.submodule_search_locations[0]}/lib:{b64.parent}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    root = tmp_path_factory.mktemp("models")
    (root / "simple" / "1").mkdir(parents=True)
    (root / "simple" / "config.pbtxt").write_text(ADD_SUB)
    write(root, "sums", SUMS, accumulator("direct {}"))
    write(root, "python", PYTHON, ADD_SUB.replace('"add_sub"', '"python"'))
    inputs, outputs = ([f"{side}{i}" for i in (0, 1)] for side in ("INPUT", "OUTPUT"))
    step = "python", dict(zip(inputs, inputs, strict=True)), dict(zip(outputs, outputs, strict=True))
    write_models(
        root, {"pipe": ensemble(inputs, outputs, [step], kind="FP32", dims="16"), "repeat": REPEAT, "llm": LLM}
    )
    with in_process(root, grpc_port=0, allow_client_shm=True) as found:
        yield found


def measured(served: Threaded, libraries: str, out: Path, protocol: str, *flags: str) -> list[dict[str, str]]:
    """The rows of the table that it writes. It ends with an error where any request had one."""
    url = served.url.removeprefix("http://") if protocol == "http" else served.grpc_url
    fixed = ("-p", "400", "-r", "20", "-s", "100", "--verbose-csv")  # a busy machine is not stable soon
    command = [str(PROGRAM), "-i", protocol, "-u", url, "-f", str(out), *fixed, *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": libraries}, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "flags", [(), ("-b", "4"), ("--shared-memory", "system"), ("--request-rate-range", "50:50")], ids=str
)
def test_loads_of_a_tensor_model(
    served: Threaded, libraries: str, tmp_path: Path, protocol: str, flags: tuple[str, ...]
) -> None:
    """The server's own times, of its statistics, stand in the table beside the client's."""
    levels = () if "--request-rate-range" in flags else ("--concurrency-range", "1:2")
    rows = measured(served, libraries, tmp_path / "out.csv", protocol, "-m", "simple", *levels, *flags)
    assert len(rows) == (2 if levels else 1)
    for row in rows:
        assert float(row["Inferences/Second"]) > 0 and float(row["Avg latency"]) > 0
        for phase in ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output"):
            assert 0 <= float(row[phase]) < float(row["Avg latency"]), phase


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["python", "pipe"])
def test_loads_of_a_model_py_and_an_ensemble(
    served: Threaded, libraries: str, tmp_path: Path, model: str, protocol: str
) -> None:
    (row,) = measured(served, libraries, tmp_path / "out.csv", protocol, "-m", model, "--concurrency-range", "2:2")
    assert float(row["Inferences/Second"]) > 0


@pytest.mark.parametrize("model", ASKED)
def test_loads_of_decoupled_models(served: Threaded, libraries: str, tmp_path: Path, model: str) -> None:
    """A tensor model's responses, and a language model's tokens, over gRPC's stream."""
    (tmp_path / "asked.json").write_text(json.dumps({"data": [ASKED[model]]}))
    flags = ("-m", model, "--streaming", "--input-data", str(tmp_path / "asked.json"), "--concurrency-range", "2:2")
    (row,) = measured(served, libraries, tmp_path / "out.csv", "grpc", *flags)
    assert float(row["Inferences/Second"]) > 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_loads_of_sequences(served: Threaded, libraries: str, tmp_path: Path, protocol: str) -> None:
    flags = ("-m", "sums", "-z", "--sequence-length", "4", "--num-of-sequences", "2", "--concurrency-range", "2:2")
    streaming = ("--streaming",) if protocol == "grpc" else ()
    (row,) = measured(served, libraries, tmp_path / "out.csv", protocol, *flags, *streaming)
    assert float(row["Inferences/Second"]) > 0
