"""A sequence whose numbers are not finite fails alone: neighbours, and whoever gets its pages, answer as ever."""

import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from millrace.api.offline_generate import generate
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.native.executor import NativeExecutor
from millrace.kernels import operand_places
from millrace.kernels.library import usable_isas
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from tests.runtime.fakes import RandomBudget
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build

BAD = {7: np.nan, 8: np.inf, 9: -np.inf}  # tokens whose rows of the embedding table are not finite
ENGINES = ("fp32", "bf16", "w8a8", "w4a8 over int8", "w4a16 over f32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = random_checkpoint(
        tmp_path_factory.mktemp("not-finite") / "checkpoint", "llama", seed=6, hidden_size=128, intermediate_size=100,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, vocab_size=300,
    )  # fmt: skip
    for shard in folder.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(shard)
        for token, value in BAD.items():
            if "model.embed_tokens.weight" in tensors:
                tensors["model.embed_tokens.weight"][token] = value
        safetensors.numpy.save_file(tensors, shard, {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    precision, _, kv = request.param.partition(" over ")
    out = tmp_path_factory.mktemp("engines") / "engine"
    with pytest.MonkeyPatch.context() as patch:  # a build refuses such a table: it is how numbers overflow at will here
        patch.setattr(operand_places, "finite", lambda array, dtype: array.astype(dtype))
        return build(checkpoint, out, precision, group=32, max_step_tokens=96, kv=KvFormat[kv.upper()] if kv else None)


def answers(
    engine: Engine, executor: NativeExecutor, prompts: dict[int, list[int]], chunks: int = 0
) -> dict[int, list[int] | None]:
    """All at once, each with the seed that is its key; None where it failed. `chunks` seeds how prompts are cut."""
    budget = RandomBudget(executor.limits.max_step_tokens, random.Random(chunks)) if chunks else None
    loop = EngineLoop(executor, open_tokenizer(engine.folder), GenerationDefaults(), budget=budget)
    never = dict.fromkeys(BAD, -100.0)
    params = [
        SamplingParams(max_tokens=10, ignore_eos=True, seed=seed, temperature=seed % 4, logit_bias=never)
        for seed in prompts
    ]
    made = [o.outputs[0] for o in generate(loop, [{"prompt_token_ids": p} for p in prompts.values()], params)]
    for answer in made:
        assert (answer.finish_reason is FinishReason.ERROR) == ("finite" in (answer.error or "")), answer.error
    failed = [answer.finish_reason is FinishReason.ERROR for answer in made]
    return {seed: None if f else list(a.token_ids) for seed, a, f in zip(prompts, made, failed, strict=True)}


def random_prompts(seed: int) -> dict[int, list[int]]:
    """Eight of 1 to 90 tokens; every other has a bad one, at its beginning, at its end, or on the way."""
    rng = random.Random(seed)
    made = {}
    for i in range(8):
        made[i] = [rng.randrange(10, 300) for _ in range(rng.choice([1, 2, 33, 64, 90]))]
        if i % 2:
            made[i][rng.choice([0, len(made[i]) // 2, -1])] = rng.choice(list(BAD))
    return made


@pytest.mark.parametrize("isa", usable_isas())
def test_it_fails_alone(engine: Engine, isa: str) -> None:
    """Few pages, so that they change hands all the time, some in the middle of an answer."""
    prompts = random_prompts(seed=1)
    good = {seed: p for seed, p in prompts.items() if seed % 2 == 0}
    expected: dict[int, list[int] | None] = dict.fromkeys(prompts)
    for seed, prompt in good.items():
        executor = engine.executor(n_pages=2, threads=1, isa=isa)
        expected |= answers(engine, executor, {seed: prompt})
        executor.close()
    executor = engine.executor(n_pages=6, threads=2, isa=isa)
    for chunks in (0, 1, 2):
        assert answers(engine, executor, prompts, chunks) == expected
    assert answers(engine, executor, good) == {seed: expected[seed] for seed in good}
    executor.close()
