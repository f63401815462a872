"""Steps of a GPU that overlap: what one draws is the next one's input without the host, here on tensors of this CPU."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.api.offline_generate import Collector, CompletionOutput, new_output
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.engine.cuda import executor as executor_
from millrace.engine.cuda.cuda_graphs import default_buckets
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.host_device_copy import on_device_context
from millrace.engine.executor import ExecutionError, Executor, SampleError, StepInputs, plain_rows
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams
from tests.engine.test_cuda import LIMITS, both, step_of
from tests.runtime.fakes import RandomBudget
from tests.support.one_step import i32
from tests.support.shared import shared

FOLDER = shared("models/stories260K")
# A quarter of the pages that the eight need.
OF = replace(LIMITS, page_tokens=16, n_pages=9, max_step_tokens=64, vocab_size=512)
PROMPTS = [[1], [1, 403, 407], list(range(300, 390)), [1, 403], [1, 300], list(range(300, 389)), [1, 403, 407], [5]]
PARAMS = [
    SamplingParams(
        max_tokens=24 + 6 * i, temperature=(0.0, 0.8, 1.0)[i % 3], seed=i,
        stop=[(), ("toys",), ("shoes", "fish")][i % 3],
        presence_penalty=2.0 * (i in (5, 6)), logprobs=2 if i == 2 else None, ignore_eos=i % 2 == 0, n=1 + (i == 1),
    )
    for i in range(8)
]  # fmt: skip


@pytest.fixture(scope="module")
def plainly() -> CudaExecutor:
    graph = both(FOLDER, "fp32", replace(LIMITS, vocab_size=512))[0]._graph
    return CudaExecutor(lower_for_gpu(graph, "fp32"), OF, device="cpu")


def answers(executor: Executor, depth: int) -> tuple[list[list[CompletionOutput]], EngineLoop, int]:
    """Of all but the third request, which is cancelled when it has told ten tokens; and the most steps under way."""
    executor.depth = depth
    budget = RandomBudget(OF.max_step_tokens, random.Random(1))
    loop = EngineLoop(executor, open_tokenizer(FOLDER), GenerationDefaults(), budget=budget)
    told: list[list[Delta]] = [[] for _ in PROMPTS]
    requests = [loop.submit(p, s, t.extend) for p, s, t in zip(PROMPTS, PARAMS, told, strict=True)]
    most, gone = 0, False
    while loop.step():
        most = max(most, bool(loop._in_flight))
        if not gone and sum(d.n_tokens for d in told[3]) >= 10:
            loop.cancel(requests[3])
            gone = True
    collectors = [Collector(new_output(r), loop.tokenizer) for r in requests]
    for collector, deltas in zip(collectors, told, strict=True):
        collector.add(deltas)
    assert loop.stats().pages_used == 0 and told[3][-1].finish_reason is FinishReason.ABORT
    return [c.output.outputs for i, c in enumerate(collectors) if i != 3], loop, most


def test_two_steps_under_way_give_the_same_answers(plainly: CudaExecutor) -> None:
    """Beside stop strings, a penalty, log probabilities, choices, pages that run short and one that is cancelled;
    mixed steps, and those of buckets."""
    bucketed = CudaExecutor(plainly._lowered, OF, buckets=default_buckets(8), device="cpu")
    want, alone, most = answers(plainly, 1)
    assert not most and alone.stats().preemptions_total > 0
    got, loop, most = answers(bucketed, 2)
    assert most and loop.stats().healthy
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
    assert {out.finish_reason for outputs in want for out in outputs} == {"stop", "length"}


@pytest.mark.parametrize("buckets", [(), (1, 2)])
def test_a_launched_step_takes_what_the_one_before_draws(buckets: tuple[int, ...], plainly: CudaExecutor) -> None:
    """Rows in any order; a row that drew nothing hands on any token, and spoils nobody else's."""
    executor = CudaExecutor(plainly._lowered, OF, buckets=buckets, device="cpu")
    first = step_of([([1, 403], 0, [0]), ([1, 7, 9], 0, [1])], plain_rows(2))
    first.sampling["token"] = [4, 1]
    tokens = executor.run(first).tokens.tolist()
    second = step_of([([tokens[1]], 2, [0]), ([tokens[0]], 3, [1])], plain_rows(2))
    second.sampling["token"] = [0, 1]
    want = executor.run(second).tokens.tolist()
    blind: StepInputs = replace(second, tokens=i32([0, 0]), pending_tokens=i32([[0, 1], [1, 0]]))
    executor.launch(first)
    executor.launch(blind)
    assert executor.wait().tokens.tolist() == tokens and executor.wait().tokens.tolist() == want
    assert blind.tokens.tolist() == [0, 0], "inputs stay as they are"
    masked = replace(first, masks=np.zeros((1, 16), np.uint32))
    masked.sampling["mask"] = [1, 0]
    executor.launch(masked)
    executor.launch(blind)
    assert executor.wait().tokens[0] < SampleError.NOT_FINITE and executor.wait().tokens[0] == want[0]
    first.sampling["mask"] = 0


def test_a_penalty_counts_what_the_step_before_draws(plainly: CudaExecutor) -> None:
    """Each row's own: where presence is a reward, it draws just that."""
    executor = CudaExecutor(plainly._lowered, OF, device="cpu")
    first = step_of([([1, 403], 0, [0]), ([1, 7, 9], 0, [1])], plain_rows(2))
    first.sampling["token"] = [1, 4]
    a, b = executor.run(first).tokens.tolist()
    second = step_of(
        [([0], 2, [0]), ([0], 3, [1])], plain_rows(2), pending_tokens=i32([[0, 0], [1, 1]]),
        history=i32([1, 0, 1, 7, 0]),
        pending_history=i32([[1, 0], [4, 1]]),
    )  # fmt: skip
    of = second.sampling
    of["token"], of["history_start"], of["history_prompt"], of["history_output"] = [0, 1], [0, 2], [1, 2], 1
    of["presence_penalty"] = -1000
    executor.launch(first)
    executor.launch(second)
    assert executor.wait().tokens.tolist() == executor.wait().tokens.tolist() == [a, b] and a != b
    assert second.history.tolist() == [1, 0, 1, 7, 0], "inputs stay as they are"


def test_a_replay_may_write_over_what_the_one_before_gave(
    plainly: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As captures do that share memory: what a later step still wants of it was taken before."""
    outputs: list[torch.Tensor] = []

    def sharing(compute: Callable[[], torch.Tensor], *_: object) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            found = compute()
            for x in outputs:
                x.fill_(7)
            outputs[:] = [found]
            return found

        return replay

    monkeypatch.setattr(executor_, "captured", sharing)
    executor = CudaExecutor(plainly._lowered, OF, buckets=(2,), device="cpu")
    first = step_of([([1], 0, [0]), ([403], 0, [1])], plain_rows(2))
    first.sampling["token"] = [0, 1]
    a, b = executor.run(first).tokens.tolist()
    second = step_of(
        [([0], 1, [0]), ([0], 1, [1])], first.sampling.copy(), pending_tokens=i32([[0, 0], [1, 1]]),
        history=i32([0, 0]),
        pending_history=i32([[0, 0], [1, 1]]),
    )  # fmt: skip
    second.sampling["history_start"], second.sampling["history_output"] = [0, 1], 1
    second.sampling["presence_penalty"] = -1000
    assert executor.run(second).tokens.tolist() == [a, b] and 7 not in (a, b)


def test_a_step_that_runs_out_of_memory_is_alone(plainly: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in its middle, beside one that is under way: that one's tokens come, and so do those of the next."""

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    executor = CudaExecutor(plainly._lowered, OF, device="cpu")
    step = step_of([([1, 403], 0, [0]), ([1, 7, 9], 0, [1])], plain_rows(2))
    step.sampling["token"] = [1, 4]
    want = executor.run(step).tokens.tolist()
    executor.launch(step)
    with monkeypatch.context() as patched:
        patched.setattr(executor, "gated", fails)
        with pytest.raises(RuntimeError, match="CUDA"):
            executor.launch(step)
    assert executor.wait().tokens.tolist() == want and executor.run(step).tokens.tolist() == want


def test_a_kernel_that_a_gpu_cannot_run_is_an_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's errors are nobody's whom the loop expects."""
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    why = "cannot run on this GPU: out of resource: shared memory"
    with pytest.raises(ExecutionError, match=why), on_device_context(torch.device("cuda")):
        raise errors.OutOfResources(1 << 20, 1 << 18, "shared memory")
