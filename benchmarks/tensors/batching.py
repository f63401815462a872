"""What dynamic batching keeps of the speed that batches have: PP-OCRv4's classifier of lines, asked by 16 at a time.

    pip install onnxruntime==1.31.1 rapidocr-onnxruntime==1.4.4
    python -m benchmarks.tensors.batching

In process, and in turn: ONNX Runtime's own session given one line at a time, and 16 in one array; and the model of
`examples/ocr` in a repository, asked for one line by one client, and by 16, each of whom asks again once it is
answered. Lines are FP32[3, 48, 192]; the session has all cores, the model's instances share them. All answers are
compared before anything is timed. Writes results/batching-TIME-COMMIT.json.
"""

import argparse
import asyncio
import json
import runpy
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.record import count, judged, provenance, write_result
from millrace.machine.cpu import usable_cores
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.tensors import Array

EXAMPLE = Path(__file__).parents[2] / "examples" / "ocr"
NAME, INPUT, OUTPUT = "classifier", "x", "save_infer_model/scale_0.tmp_1"
CLIENTS = 16
NEAR = 1e-5  # between answers of one batch and of another: the order of sums differs


def run(rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    models = folder / "models"
    shutil.copytree(EXAMPLE / "models", models)
    runpy.run_path(str(EXAMPLE / "put_models.py"))["put"](models)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples, sizes = runner.run(_measured(models, rounds, seconds))
    import onnxruntime

    return {
        **provenance("benchmarks.tensors.batching"), "model": "PP-OCRv4 classifier, FP32[3, 48, 192]",
        "versions": {"onnxruntime": onnxruntime.__version__}, "clients": CLIENTS, "seconds": seconds,
        "samples": samples, "batch_sizes": sizes, "goals": goals(samples),
    }  # fmt: skip


async def _measured(models: Path, rounds: int, seconds: float) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Lines a second of each round and way; how many batches there were of each size. The first round warms up."""
    flags = RepositoryFlags(model_repository=(str(models),), model_control_mode="explicit", load_model=(NAME,))
    repository = ModelRepository(flags)
    assert await repository.start() == []
    model, session = repository.get(NAME), _session(models / NAME / "1" / "model.onnx")
    lines = np.random.default_rng(0).uniform(-1, 1, (CLIENTS, 3, 48, 192)).astype(np.float32)
    lines.flags.writeable = False  # as what comes from a socket is
    await _same(model, session, lines)
    ways: Mapping[str, Callable[[], Awaitable[float]]] = {
        "runtime_1": lambda: _alone(session, lines[:1], seconds),
        "runtime_16": lambda: _alone(session, lines, seconds),
        "ours_1": lambda: _asked(model, lines[:1], seconds),
        "ours_16": lambda: _asked(model, lines, seconds),
    }
    found, sizes = list[dict[str, float]](), Counter[str]()
    for i in range(rounds + 1):
        sample = {}
        for name in [*ways][:: 1 if i % 2 else -1]:
            before = _sizes(model)
            sample[name] = await ways[name]()
            if i and name == "ours_16":
                sizes += _sizes(model) - before
        if i:
            found.append(sample)
    await repository.close(5)
    return found, dict(sizes)


def _session(file: Path) -> Any:
    """With all cores, as the backend makes it where a model has one instance."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


async def _same(model: Model, session: Any, lines: Array) -> None:
    (exact,) = session.run([OUTPUT], {INPUT: lines})
    answers = await asyncio.gather(*(model.infer(_request(line)) for line in lines))
    far = max(np.abs(a.outputs[OUTPUT][0] - e).max() for a, e in zip(answers, exact, strict=True))
    assert far <= NEAR, f"answers differ by {far}"


def _request(line: Array) -> InferRequest:
    request = InferRequest({INPUT: line[None]})
    request.batch_size = 1
    return request


async def _alone(session: Any, lines: Array, seconds: float) -> float:
    """Lines a second, so many an array."""
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        session.run([OUTPUT], {INPUT: lines})
        n += len(lines)
    return n / (time.perf_counter() - began)


async def _asked(model: Model, lines: Array, seconds: float) -> float:
    """Lines a second, of as many clients as there are lines."""
    n, began = 0, time.perf_counter()

    async def client(line: Array) -> None:
        nonlocal n
        while time.perf_counter() - began < seconds:
            await model.infer(_request(line))
            n += 1

    await asyncio.gather(*map(client, lines))
    return n / (time.perf_counter() - began)


def _sizes(model: Model) -> Counter[str]:
    return Counter(
        {str(one["batch_size"]): one["compute_infer"]["count"] for one in model.statistics_dict()["batch_stats"]}
    )


def median(samples: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(sample[name] for sample in samples)


def goals(samples: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    gained = [(s["ours_16"] - s["runtime_1"]) / (s["runtime_16"] - s["runtime_1"]) for s in samples]
    what = f"of what ONNX Runtime gains from batches of {CLIENTS}, {CLIENTS} clients through dynamic batching"
    return [judged(f"{what}; {len(gained)} rounds", statistics.median(gained), 0.9, 0.9)]


def summary(result: dict[str, Any]) -> str:
    samples = result["samples"]
    lines = [f"{result['model']}: lines a second"]
    for name in samples[0]:
        lines.append(f"  {name:10}: {median(samples, name):8,.0f}")
    lines.append(f"  batches by size: {result['batch_sizes']}")
    lines += [f"  {g['what']}: {g['reached']} ({g['verdict']})" for g in result["goals"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensors.batching", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, default=15, help="default: %(default)s")
    parser.add_argument("--seconds", type=count, default=1, help="of one way; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.rounds, args.seconds, Path(temporary))
    path = write_result("batching", result)
    print(json.dumps(result) if args.json else f"{summary(result)}\n{path}")


if __name__ == "__main__":
    main()
