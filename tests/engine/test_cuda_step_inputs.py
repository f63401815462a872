"""What a step may bring beside token ids, on the executor of a GPU: embedding rows, rotary positions, adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.api.offline_generate import generate
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.lower_gpu.memory import needs_of
from millrace.compile.passes.pipeline import gpu, pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.executor import ExecutionError
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.kernels.catalogue import operators
from millrace.model.module import trace_model
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.engine.test_caches import N_ADAPTERS, Adapted, Shared, mixed
from tests.engine.test_cuda import LIMITS, PROMPTS, both
from tests.engine.test_cuda_buckets import decode
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import prompts_as_step
from tests.support.one_step import i32

Pair = tuple[CudaExecutor, ReferenceExecutor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose embeddings are scaled, as rows are not."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "gemma", "gemma", seed=5)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return both(folder, "fp32")


def agree(pair: Pair, step: Any, tolerance: float = 2e-5) -> None:
    got, want = pair[0].logits(step).numpy(), pair[1].logits(step)
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 0.03)])
def test_rows_in_place_of_tokens(precision: str, tolerance: float, folder: Path) -> None:
    """Some of several prompts' tokens, in any order of rows; the step behind it brings none."""
    step, rows = prompts_as_step(PROMPTS), np.random.default_rng(1).standard_normal((5, 320)).astype(np.float32)
    tokens = step.tokens.copy()
    tokens[[0, 2, 30, 41, 43]] = [-3, -1, -5, -2, -4]
    pair = both(folder, precision)
    agree(pair, replace(step, tokens=tokens, embeddings=rows), tolerance)
    agree(pair, step, tolerance)


@pytest.mark.parametrize("buckets", [(), (4,)])
def test_rotary_positions(buckets: tuple[int, ...], pair: Pair) -> None:
    """Not ascending, and with gaps: of a prompt, then of decode steps, which a bucket takes."""
    ours = CudaExecutor(pair[0]._lowered, LIMITS, buckets=buckets, device="cpu")
    prompts = prompts_as_step([[5, 900, 17, 33, 2, 8], [7, 7]])
    agree((ours, pair[1]), replace(prompts, rotary_positions=i32([0, 1, 1, 1, 7, 200, 3, 2])))
    alone = decode([6, 2], [[0], [1]], [1, 0])
    for step in (replace(alone, rotary_positions=i32([9, 255])), alone):
        agree((ours, pair[1]), step)
    assert len(ours._inputs) == len(buckets)


@pytest.mark.parametrize("buckets", [(), (4,)])
def test_each_sequence_has_its_adapter(buckets: tuple[int, ...]) -> None:
    """Of a prompt, then of decode steps, which a bucket takes; without adapters all have none."""
    source, wanted = mixed(Adapted()), precision_map("fp32", 16)
    traced = trace_model(source.module, source.weights, operators())
    exact = ReferenceExecutor(run_passes(traced, pipeline(wanted)), LIMITS, kv=KvFormat.F32, bf16_table=False)
    graph = run_passes(traced, gpu(wanted))
    ours = CudaExecutor(lower_for_gpu(graph, "fp32"), LIMITS, buckets=buckets, device="cpu")
    assert ours.limits.n_adapters == N_ADAPTERS
    numbers = i32([1, 0, 2])
    prompts = prompts_as_step([[1, 2, 3], [1, 2, 3], list(range(40))])
    for step in (replace(prompts, adapters=numbers), prompts):
        agree((ours, exact), step)
    alone = decode([6, 2, 3], [[0], [1], [2]], [2, 0, 1])
    for step in (replace(alone, adapters=numbers), alone, replace(alone, adapters=numbers[::-1].copy())):
        agree((ours, exact), step)
    assert len(ours._inputs) == len(buckets)
    with pytest.raises(ExecutionError, match="an adapter that does not exist"):
        ours.run(replace(alone, adapters=numbers + 1))
    with pytest.raises(ExecutionError, match="2 adapters of 3 sequences"):
        ours.run(replace(alone, adapters=numbers[:2]))


@pytest.mark.parametrize("buckets", [(), (4,)])
def test_layers_that_read_another_layers_cache(buckets: tuple[int, ...]) -> None:
    """Three layers, one of which keeps keys and values."""
    source, wanted = mixed(Shared()), precision_map("fp32", 16)
    traced = trace_model(source.module, source.weights, operators())
    exact = ReferenceExecutor(run_passes(traced, pipeline(wanted)), LIMITS, kv=KvFormat.F32, bf16_table=False)
    lowered = lower_for_gpu(run_passes(traced, gpu(wanted)), "fp32")
    ours = CudaExecutor(lowered, LIMITS, buckets=buckets, device="cpu")
    for step in (prompts_as_step([[1, 2, 3], list(range(40))]), decode([3, 40], [[0], [1]], [1, 0])):
        agree((ours, exact), step)
    assert needs_of(lowered, LIMITS).page_bytes == LIMITS.page_tokens * 2 * (16 + 16) * 4


def test_a_decode_step_of_rows_has_no_bucket(pair: Pair) -> None:
    ours = CudaExecutor(pair[0]._lowered, LIMITS, buckets=(4,), device="cpu")
    rows = np.random.default_rng(2).standard_normal((1, 320)).astype(np.float32)
    step = decode([0, 0], [[0], [1]], [1, 0])
    agree((ours, pair[1]), replace(step, tokens=i32([5, -1]), embeddings=rows))
    assert not ours._inputs


@pytest.mark.parametrize(("changes", "why"), [
    ({"tokens": i32([1, -1])}, "token -1, and 0 embedding rows"),
    ({"tokens": i32([1, -2]), "embeddings": np.zeros((1, 320), np.float32)}, "token -2, and 1 embedding rows"),
    ({"embeddings": np.zeros((1, 321), np.float32)}, "not rows of 320 float32"),
    ({"embeddings": np.zeros((1, 320))}, "embeddings are float64"),
    ({"embeddings": np.zeros(320, np.float32)}, "not rows of 320 float32"),
    ({"rotary_positions": i32([0, 256])}, "beyond the context"), ({"rotary_positions": i32([-1, 0])}, "beyond"),
    ({"rotary_positions": i32([0])}, "1 rotary positions of 2 tokens"),
])  # fmt: skip
def test_what_is_illegal(changes: dict[str, Any], why: str, pair: Pair) -> None:
    with pytest.raises(ExecutionError, match=why):
        pair[0].run(replace(prompts_as_step([[1, 2]]), **changes))


def test_a_prompt_of_rows_through_the_loop(folder: Path, pair: Pair) -> None:
    """As the tokens that they stand for, whose answer draws tokens."""
    table = Checkpoint.open(folder).tensors.load("model.embed_tokens.weight").astype(np.float32) * np.sqrt(320)
    loop = EngineLoop(pair[0], open_tokenizer(folder), GenerationDefaults())
    ids, params = PROMPTS[1], SamplingParams(max_tokens=6, ignore_eos=True)
    found = [generate(loop, [prompt], params)[0].outputs[0].token_ids
             for prompt in ({"prompt_token_ids": ids}, {"prompt_embeds": table[ids]})]  # fmt: skip
    assert found[0] == found[1] and len(found[0]) == 6
