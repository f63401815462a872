"""What a process of its own costs a model.py: a tensor there and back, beside the same model in this process.

    python -m benchmarks.tensors.child

The model answers with what it is asked, FP32[n], of 64 bytes to 8 MiB, one request at a time, in process and in a child
in turn (`parameters { key: "MILLRACE_PROCESS" value { string_value: "own" } }`). A tensor is copied once on its way
there and once on its way back, and a plain copy of as many bytes stands beside. No protocol is between. Writes
results/child-TIME-COMMIT.json.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.record import count, judged, provenance, write_result
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.tensors import Array

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """backend: "python" %s
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
OWN = 'parameters { key: "MILLRACE_PROCESS" value { string_value: "own" } }'
SIZES = (64, 64 << 10, 1 << 20, 8 << 20)
MIB = 1 << 20


def run(rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    for name, more in (("here", ""), ("child", OWN)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(MODEL)
        (folder / name / "config.pbtxt").write_text(CONFIG % more)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(_measured(folder, rounds, seconds))
    return {
        **provenance("benchmarks.tensors.child"),
        "model": "identity model.py",
        "seconds": seconds,
        "samples": samples,
        "goals": goals(samples),
    }


async def _measured(root: Path, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Of each round and size microseconds of a request, and of a copy; the first round warms up."""
    repository = ModelRepository(RepositoryFlags(model_repository=(str(root),)))
    assert await repository.start() == []
    found = []
    for i in range(rounds + 1):
        for n_bytes in SIZES:
            array = np.random.default_rng(i).standard_normal(n_bytes // 4, np.float32)
            array.flags.writeable = False  # as what comes from a socket is
            sample: dict[str, float] = {"n_bytes": n_bytes, "copy_us": _copied_us(array, seconds)}
            for name in ("here", "child")[:: 1 if i % 2 else -1]:
                sample[f"{name}_us"] = await _asked_us(repository.get(name), array, seconds)
            if i:
                found.append(sample)
    await repository.close(5)
    return found


async def _asked_us(model: Model, array: Array, seconds: float) -> float:
    response = await model.infer(InferRequest({"IN": array}))
    assert np.array_equal(response.outputs["OUT"], array), "another answer"
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        response = await model.infer(InferRequest({"IN": array}))
        n += 1
    return (time.perf_counter() - began) / n * 1e6


def _copied_us(array: Array, seconds: float) -> float:
    """Into memory that is there already."""
    into, n, began = np.empty_like(array), 0, time.perf_counter()
    while time.perf_counter() - began < seconds / 4:
        np.copyto(into, array)
        n += 1
    return (time.perf_counter() - began) / n * 1e6


def median(samples: Sequence[dict[str, float]], n_bytes: int, name: str) -> float:
    return statistics.median(sample[name] for sample in samples if sample["n_bytes"] == n_bytes)


def goals(samples: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    rate = MIB / median(samples, MIB, "child_us") * 1e6 / 1e9
    return [judged("GB/s of 1 MiB tensors to a model in a process of its own, and as many back", rate, 2.0, 2.0)]


def summary(result: dict[str, Any]) -> str:
    lines = ["a tensor there and back, median microseconds"]
    for n_bytes in SIZES:
        here, child, copy = (median(result["samples"], n_bytes, f"{name}_us") for name in ("here", "child", "copy"))
        rate = n_bytes / child / 1e3
        lines.append(
            f"  {n_bytes:9,} bytes: in process {here:7.0f}, own process {child:7.0f} ({rate:.2f} GB/s each way),"
            f" a copy {copy:6.1f}"
        )
    lines += [f"  {g['what']}: {g['reached']} ({g['verdict']})" for g in result["goals"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensors.child",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.rounds, args.seconds, Path(temporary))
    path = write_result("child", result)
    print(json.dumps(result) if args.json else f"{summary(result)}\n{path}")


if __name__ == "__main__":
    main()
