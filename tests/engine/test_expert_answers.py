"""Promise 1 of mixtures of experts: answers together and alone, with windows, states, preemption and prefix hits."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.kernels.library import usable_isas
from millrace.runtime.loop_stats import LoopStats
from tests.engine.test_windows import drawn, params_of, run
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build

# What the pools of a small engine are: few pages, few window pages or slots.
POOLS = {
    "gpt_oss": {"window_pages": (40,)},  # windows in some layers, sinks
    "lfm2_moe": {"n_slots": 32},  # states
    "glm4_moe": {},  # groups of experts, a dense layer, shared experts
}


@pytest.mark.parametrize("family", POOLS)
@pytest.mark.parametrize("precision", ["w4a8", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("fp32", "bf16"))])
def test_together_equals_alone(family: str, precision: str, tmp_path: Path) -> None:
    """Chunks are drawn at random; other rows choose other experts in every step."""
    folder = random_checkpoint(tmp_path / "checkpoint", family, seed=4)
    engine, best = build(folder, tmp_path / "engine", precision, max_step_tokens=512, group=32), usable_isas()[0]
    prompts = drawn(1, 63, 100, 190, 290)
    prompts += [prompts[4][:150] + prompts[2][:90], prompts[4][:256]]
    params = [replace(params_of(i), max_tokens=90) for i in range(len(prompts))]
    with closing(engine.executor(n_pages=64, threads=1, isa=best)) as executor:
        alone = [run(executor, folder, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    seen: list[LoopStats] = []
    for n_pages, threads, isa, seed in (
        (64, 2, best, 0),
        (64, 2, best, 1),
        (9, 2, best, 2),
        (64, 1, usable_isas()[-1], 3),
    ):
        with closing(engine.executor(n_pages=n_pages, threads=threads, isa=isa, **POOLS[family])) as executor:  # type: ignore[arg-type]
            assert run(executor, folder, prompts, params, seed, seen) == alone, f"{n_pages} pages, {isa}, {seed}"
    assert any(stats.prefix_hits_total for stats in seen)
    assert any(stats.preemptions_total for stats in seen)
