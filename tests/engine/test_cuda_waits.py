"""The executor on a GPU that computes nothing: every tensor is on its device, and no step waits for what is queued."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.sampling import SamplingMode
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import StepInputs, WindowPages
from millrace.kernels.attention.paged import LayerPages
from tests.engine.test_cuda import LIMITS, VOCAB, both, drawn_rows
from tests.support.checkpoints import random_checkpoint
from tests.support.one_step import i32, packed

pytest.importorskip("triton", reason="triton is not installed")
from tests.support.compilations import launched
from tests.support.fake_cuda import DEVICE, FakeCuda, executor_like, on_fake_cuda

KINDS = (("bf16", None), ("w4a16", KvFormat.INT8), ("w8a8", None), ("fp8", KvFormat.FP8))


@pytest.fixture(scope="module", params=KINDS, ids=[kind for kind, _ in KINDS])
def plainly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CudaExecutor:
    """On tensors of the CPU."""
    precision, kv = request.param
    folder = random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", seed=5)
    found = both(folder, "fp8a16" if precision == "fp8" else precision, kv=kv)[0]
    if precision == "fp8":
        found._lowered = lower_for_gpu(found._graph, "bf16", {o for node in found._loaded.coded for o in node.origin})
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with on_fake_cuda(monkeypatch) as found:
        yield found


def test_steps_wait_for_nothing(plainly: CudaExecutor, device: FakeCuda) -> None:
    """Prompts, in few rows and in many, drawn in every way there is; behind them what the device itself has drawn."""
    there = executor_like(plainly, LIMITS, ())
    device.warming = True
    launched(there, dummy_step([3, 70], 0, 4, vocab=VOCAB))
    device.launched.clear()
    device.warming = False
    rng = np.random.default_rng(1)
    for lengths in ([3, 70], [3, 5]):
        step = dummy_step(lengths, 0, 4, vocab=VOCAB)
        wanted = drawn_rows(rng, 40)
        wanted["token"] %= sum(lengths)
        drawn = replace(
            step, sampling=wanted, history=i32(rng.integers(0, VOCAB, 60)), bias_ids=i32(rng.permutation(VOCAB)[:8]),
            bias_values=np.ones(8, np.float32), masks=packed(*(rng.random((2, VOCAB)) < 0.2)), copies=i32([[7, 8]]),
        )  # fmt: skip
        assert (wanted["n_top"] >= 0).any() and wanted["bias_count"].any() and (wanted["temperature"] > 0).any()
        tokens, width = step.tokens.copy(), there.limits.embedding_width
        tokens[1] = -1
        rows = replace(step, tokens=tokens, embeddings=np.ones((1, width), np.float32))
        rows = replace(rows, rotary_positions=i32([7] * sum(lengths)))
        for of in (step, drawn, replace(step, pending_tokens=i32([[2, 0]])), rows):
            launched(there, of)
    seen = Counter(device.launched)
    assert seen["rotate_and_keep"] == 8 * 2 and seen["attend"] >= 8 * 2 and seen["draw_rows"] == 2
    assert any(name.startswith("_scaled_mm") for name in device.called) == bool(plainly._lowered.e4m3)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> CudaExecutor:
    """With soft caps, too."""
    return both(random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "gemma2", "gemma2", seed=5), "bf16")[0]


def test_windows_wait_for_nothing(windowed: CudaExecutor, device: FakeCuda) -> None:
    """Prompts beside decode rows, and a bucket whose replay is one launch; pages of a window are copied there, too."""
    there = executor_like(windowed, windowed.limits, (1, 4))
    device.warming = True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(there, "run", partial(launched, there))
        there.warm()
    device.warming = False
    step = dummy_step([3, 70], 0, 4, vocab=VOCAB)
    window = WindowPages(step.pages, step.page_starts, i32([0, 0]), i32([[1, 3]]))
    device.launched.clear()
    launched(there, replace(step, windows=(window,)))
    assert device.launched.count("attend") == 4 and device.launched.count("rotate_and_keep") == 2
    device.launched.clear()
    one = dummy_step([1, 1], 130, 6, vocab=VOCAB)
    launched(there, replace(one, windows=(WindowPages(i32([4, 5, 6]), i32([0, 2, 3]), i32([1, 2])),)))
    assert device.launched == ["replay"]


def test_a_prompts_first_part_draws_nothing(plainly: CudaExecutor, device: FakeCuda) -> None:
    """No row goes through the head, and no kernel behind it is launched; the next step has its tokens all the same."""
    there = executor_like(plainly, LIMITS, ())
    step = dummy_step([70], 0, 2, vocab=VOCAB)
    device.warming = True
    launched(there, replace(step, sampling=step.sampling[:0]))
    assert device.launched.count("attend") == 2 and "best_rows" not in device.launched
    assert there._last_tokens is not None and there._last_tokens.shape == (0,)


def test_a_capture_copies_nothing(
    plainly: CudaExecutor, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """From the host, that is; a replay then is one launch, behind the copies of what the host has for it."""
    there = executor_like(plainly, LIMITS, (1, 4))
    device.warming = True
    lengths = list[int]()

    def run(step: StepInputs) -> None:
        lengths.append(len(step.tokens))
        launched(there, step)

    with monkeypatch.context() as patched:
        patched.setattr(there, "run", run)
        there.warm()
    device.warming = False
    assert set(there._replays) == {(n, way) for n in (1, 4) for way in SamplingMode} and device.captures == 4
    largest = LIMITS.max_step_tokens
    assert lengths == [4, 4, 1, 1, 16, 63, largest, largest], "what a step leaves to the next one a capture gives back"
    assert device.streams == 1, "libraries keep a workspace for each stream that they meet"
    device.launched.clear()
    device.called.clear()
    launched(there, dummy_step([1, 1, 1], 5, 3, vocab=VOCAB))
    assert device.launched == ["replay"] and len(device.called) < 60, device.called


def test_what_waits_is_seen(device: FakeCuda) -> None:
    """The device's own check: each of these would."""
    x, host = torch.zeros(3, 4, device=DEVICE), torch.ones(4)
    waits: list[tuple[Callable[[], object], str]] = [
        (lambda: x.to("cpu"), "waits"), (lambda: x.max().item(), "waits"), (lambda: x[x > 0], "waits"),
        (lambda: x.copy_(host), "waits"), (lambda: x.copy_(host, non_blocking=True), "not of pinned memory"),
        (lambda: x + host, "add of"), (lambda: x[torch.zeros(2, dtype=torch.int64)], "index of"),
    ]  # fmt: skip
    for wrong, why in waits:
        with pytest.raises(AssertionError, match=why):
            wrong()
    with (
        device.graph(None, None, device.stream(DEVICE), "thread_local"),
        pytest.raises(AssertionError, match="within a capture"),
    ):
        x.copy_(device.pinned(host, x.device), non_blocking=True)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "w4a16", "fp8a16", "gemma2", "lfm2"])
def test_no_step_has_a_kernel_compiled_anew(precision: str) -> None:
    """Beside its constants: by how long a step is, or where its tables lie. A compilation stops everybody's tokens."""
    command = [sys.executable, "-m", "tests.support.compilations", "anew", precision]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == []


def test_weights_and_pages_are_made_on_their_own_device(
    plainly: CudaExecutor, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The current one, which another thread's default is not: pinned memory, streams and events go by that."""
    current: list[object] = []
    made: list[tuple[str, object]] = []

    @contextmanager
    def on(of: object) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    empty = LayerPages.empty

    def pages(*given: Any) -> LayerPages:
        made.append(("pages", current[-1:]))
        return empty(*given)

    monkeypatch.setattr(LayerPages, "empty", pages)
    there = executor_like(plainly, LIMITS, (), loaded=lambda: made.append(("weights", current[-1:])))
    assert [what for what, _ in made] == ["weights", *["pages"] * len(there._pages)]
    assert all(of == [DEVICE] for _, of in made) and not current
