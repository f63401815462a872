"""What steps on a GPU that computes nothing have compiled, as JSON; in a process of its own that interprets no kernel.

python -m tests.support.compilations anew fp8a16   what drawn steps would have compiled after the warm-up (or: gemma2)
python -m tests.support.compilations all fp8       compiles whatever two layers of Llama-3.1-8B's shape launch
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.model import LLAMA_8B, graph_of, lowered_graph
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda import device_constants
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.random_weights import random_loaded
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import StepInputs
from tests.engine.test_cuda import LIMITS, VOCAB, both
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.fake_cuda import DEVICE, executor_like, loaded_there, on_fake_cuda
from tests.support.one_step import i32


def executor(precision: str) -> CudaExecutor:
    """precision: of a Llama; or another family, in bfloat16"""
    kv = {"w4a16": KvFormat.INT8, "fp8a16": KvFormat.FP8}.get(precision)
    family, precision = ("llama", precision) if precision not in FAMILIES else (precision, "bf16")
    with tempfile.TemporaryDirectory() as folder:
        return both(random_checkpoint(Path(folder) / family, family, seed=5), precision, kv=kv)[0]


def drawn_steps(seed: int, n: int) -> Iterator[StepInputs]:
    """Of decode rows and prompts, whose pages are anywhere; some tokens are those that the step before draws."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        lengths = [int(m) for m in rng.choice([1, 1, 2, 7, 30], rng.integers(1, 9))]
        step = dummy_step(lengths, 0, len(lengths) * int(rng.integers(1, 4)), vocab=VOCAB)
        drawn = [[at, 0] for at in range(rng.integers(0, len(lengths) + 1))]
        rows = step.sampling[: rng.integers(1, len(lengths) + 1)]
        yield replace(step, sampling=rows, pending_tokens=i32(drawn) if drawn else None)


def launched(there: CudaExecutor, step: StepInputs) -> None:
    """Nothing comes back from such a device."""
    there.launch(step)
    there._flights.clear()


def anew(precision: str) -> list[tuple[str, str]]:
    """Kernels, and what is known of their arguments."""
    plainly = executor(precision)
    with pytest.MonkeyPatch.context() as patched, on_fake_cuda(patched) as device:
        windows = tuple(replace(w, n_pages=32) for w in plainly.limits.windows)
        there = executor_like(plainly, replace(plainly.limits, n_pages=32, windows=windows), (1, 4))
        device.warming = True
        patched.setattr(there, "run", partial(launched, there))
        there.warm()
        known = set(device.specialised)
        assert {name for name, _ in known} >= {"attend", "rotate_and_keep", "normalise"}
        for step in drawn_steps(1, 30):
            launched(there, step)
        return sorted(device.specialised - known)


def compiled(precision: str) -> list[str]:
    """The names of kernels, as often as they were compiled: of a start, mixed steps, and each tile there is."""
    from millrace.compile.tune.gpu_tiles import works_of  # Triton's

    lowered = lowered_graph(graph_of(replace(LLAMA_8B, n_layers=2, max_context=4160), precision), precision)
    limits = replace(LIMITS, max_step_tokens=8192, max_sequences=512, max_rows=520, max_context=4160, n_pages=20000)
    kv = KvFormat.FP8 if precision == "fp8" else None
    with pytest.MonkeyPatch.context() as patched, on_fake_cuda(patched) as device:
        device.warming = device.compiles = True
        patched.setattr(device_constants, "_check_finite", lambda tensors: None)  # nobody knows what is in them
        like = random_loaded(lowered, torch.bfloat16, torch.device("cpu"))
        there = CudaExecutor(lowered, limits, kv=kv, buckets=(1, 24, 64, 512), device=str(DEVICE),
                             load=lambda *_: loaded_there(like))  # fmt: skip
        patched.setattr(there, "run", partial(launched, there))
        there.warm()
        for lengths in ([1] * 512 + [128] * 8, [1] * 7 + [100], [128], [1000] * 4, [1] * 63):
            there.run(dummy_step(lengths, 0, 33 * len(lengths), vocab=VOCAB))
        for work in works_of(there):
            for tile in work.tiles.values():
                work.products(there)[0](tile)
        kernels = {f.__name__: f for f in device.kernels}
        return [name for name, kernel in sorted(kernels.items()) for _ in kernel.device_caches[0][0]]


if __name__ == "__main__":
    _, what, of = sys.argv
    sys.stdout.write(json.dumps({"anew": anew, "all": compiled}[what](of)))
