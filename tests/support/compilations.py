"""python -m tests.support.compilations: what steps after the first few would have compiled anew, as JSON.

In a process of its own, in which Triton does not interpret kernels: on a GPU that computes nothing.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.dummy import dummy_step
from millrace.engine.executor import StepInputs
from millrace.engine.kv import KvFormat
from tests.engine.test_cuda import LIMITS, VOCAB, both
from tests.support.checkpoints import random_checkpoint
from tests.support.fake_cuda import executor_like, on_fake_cuda

FIRST = [1], [2, 3], [70], [1] * 8


def executors() -> Iterator[CudaExecutor]:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "llama", "llama", seed=5)
        for precision, kv in (("bf16", None), ("w4a16", KvFormat.INT8), ("fp8a16", KvFormat.FP8)):
            yield both(checkpoint, precision, kv=kv)[0]


def drawn_steps(seed: int, n: int) -> Iterator[StepInputs]:
    """Of decode rows and prompts, whose pages are anywhere."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        lengths = [int(m) for m in rng.choice([1, 1, 2, 7, 30], rng.integers(1, 9))]
        step = dummy_step(lengths, 0, len(lengths) * int(rng.integers(1, 4)), vocab=VOCAB)
        yield replace(step, sampling=step.sampling[: rng.integers(1, len(lengths) + 1)])


def found() -> list[tuple[str, str]]:
    new: list[tuple[str, str]] = []
    for plainly in executors():
        with pytest.MonkeyPatch.context() as patched, on_fake_cuda(patched) as device:
            there = executor_like(plainly, replace(LIMITS, n_pages=32), (1, 4))
            device.warming = True
            for lengths in FIRST:
                there.launch(dummy_step(lengths, 0, 2 * len(lengths), vocab=VOCAB))
                there._flights.clear()
            known = set(device.specialised)
            assert {name for name, _ in known} >= {"attend", "rotate_and_keep", "normalise", "gated"}
            for step in drawn_steps(1, 30):
                there.launch(step)
                there._flights.clear()
            new += sorted(device.specialised - known)
    return new


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found()))
