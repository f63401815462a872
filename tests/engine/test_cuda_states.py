"""Layers with a state of fixed size, on the executor of a GPU: slots, buckets, the loop, memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.lower_gpu.memory import needs_of
from millrace.engine.cache_specs import SLOTS_PER_SEQUENCE
from millrace.engine.cuda.cuda_graphs import Bucket
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import StateSlots
from millrace.engine.reference.executor import ReferenceExecutor
from tests.engine.test_cuda import VOCAB, both
from tests.engine.test_cuda_buckets import decode
from tests.engine.test_cuda_windows import told
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import prompts_as_step
from tests.support.one_step import i32

SMALL: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 132, "num_attention_heads": 2}
Pair = tuple[CudaExecutor, ReferenceExecutor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "lfm2", "lfm2", seed=5, **SMALL)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    yield both(folder, "fp32")


def agree(ours: CudaExecutor, exact: ReferenceExecutor, step: Any) -> None:
    got, want = ours.logits(step).numpy(), exact.logits(step)
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("buckets", [(), (4,)])
def test_slots_that_are_read_and_written(buckets: tuple[int, ...], pair: Pair) -> None:
    """Prompts, then decode steps in other slots, and in those that they read; twice from one state."""
    exact = pair[1]
    ours = CudaExecutor(pair[0]._lowered, pair[0].limits, buckets=buckets, device="cpu")
    prompts = prompts_as_step([[5, 900, 17, 33, 2, 8], [7, 7]])
    agree(ours, exact, replace(prompts, states=StateSlots(i32([9, 9]), i32([3, 0]))))
    for before, behind in (([3, 0], [4, 1]), ([3, 0], [4, 0]), ([4, 0], [5, 2])):
        at = [6, 2] if before[0] == 3 else [7, 3]
        agree(ours, exact, replace(decode(at, [[0], [1]], [1, 0]), states=StateSlots(i32(before), i32(behind))))
    agree(ours, exact, decode([0], [[2]], [0]))
    assert len(ours._inputs) == len(buckets)


def test_rows_that_fill_a_bucket_have_a_slot_of_their_own() -> None:
    bucket = Bucket(4, 9, 3, 64, torch.device("cpu"), 1, (), scratch_slot=7)
    bucket.fill(decode([0, 5], [[0], [1]], [0, 1]), states=StateSlots(i32([3, 4]), i32([5, 6])))
    slots = bucket.slots()
    assert slots.before.tolist() == [-1, 4, -1, -1] and slots.behind.tolist() == [5, 6, 7, 7]
    assert slots.owner.tolist() == [0, 1, 2, 3] and slots.starts.tolist() == [0, 1, 2, 3, 4]


def test_a_loop_with_states(folder: Path, pair: Pair) -> None:
    """Prefix hits go on from a known state; few slots make sequences wait."""
    ours, exact = pair
    want = told(exact, folder, 1)
    few = CudaExecutor(ours._lowered, replace(ours.limits, max_sequences=2, n_slots=5), buckets=(1, 2), device="cpu")
    assert told(few, folder, 3) == want


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_slots_are_counted(dtype: str, pair: Pair) -> None:
    graph, limits = pair[0]._graph, pair[0].limits
    limits = replace(limits, n_slots=SLOTS_PER_SEQUENCE * limits.max_sequences)
    ours = CudaExecutor(lower_for_gpu(graph, dtype), limits, device="cpu")
    assert (
        needs_of(lower_for_gpu(graph, dtype), limits).states_bytes == sum(x.nbytes for x in ours._states.values()) > 0
    )


def test_states_stay_on_the_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for what is queued there, and a bucket's replay is one launch."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.support.compilations import launched
    from tests.support.fake_cuda import executor_like, on_fake_cuda

    with on_fake_cuda(monkeypatch) as device:
        there = executor_like(pair[0], pair[0].limits, (1, 4))
        device.warming = True
        with monkeypatch.context() as patched:
            patched.setattr(there, "run", partial(launched, there))
            there.warm()
        device.warming = False
        device.launched.clear()
        run: Callable[..., None] = partial(launched, there)
        run(replace(prompts_as_step([[5, 9, 7], [7] * 70]), states=StateSlots(i32([0, 1]), i32([2, 3]))))
        assert device.launched.count("convolve") == device.launched.count("keep_rows") == 1
        device.launched.clear()
        run(dummy_step([1, 1], 3, 2, vocab=VOCAB))
        assert device.launched == ["replay"]
