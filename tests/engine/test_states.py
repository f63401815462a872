"""Layers with a state of fixed size, as LFM2's short convolutions: promise 1, and what a step may not say."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from millrace.engine.artifact.engine import Engine
from millrace.engine.executor import ExecutionError, StateSlots
from millrace.kernels.library import usable_isas
from tests.engine.test_windows import OTHER_ISAS, drawn, params_of, run
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits, prompts_as_step
from tests.support.one_step import i32


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("lfm2")
    yield build(random_checkpoint(root / "checkpoint", "lfm2"), root / "engine", "fp32", max_step_tokens=512)


@pytest.mark.parametrize("other", OTHER_ISAS)
def test_together_equals_alone(engine: Engine, other: str) -> None:
    """Of prompts that begin alike: few pages force preemption, few slots waiting, hits go on from a known state."""
    best, prompts = usable_isas()[0], drawn(1, 63, 64, 65, 230, 400)
    prompts += [prompts[5][:150] + prompts[2][:60], prompts[5][:215], prompts[4], prompts[5][:256]]
    params = [params_of(i) for i in range(len(prompts))]
    alone = []
    with closing(engine.executor(n_pages=64, threads=1, isa=best)) as executor:
        for prompt, asked in zip(prompts, params, strict=True):
            alone += run(executor, engine.folder, [prompt], [asked])
    for n_pages, n_slots, threads, isa, seed in (
        (64, 32, 2, best, 0), (64, 4, 1, other, 1), (9, 32, 2, best, 2), (9, 2, 2, best, 3),
    ):  # fmt: skip
        with closing(engine.executor(n_pages=n_pages, threads=threads, isa=isa, n_slots=n_slots)) as executor:
            assert run(executor, engine.folder, prompts, params, seed) == alone, (
                f"{n_pages} pages, {n_slots} slots, {isa}"
            )


def test_a_state_that_was_read_is_as_it_was(engine: Engine) -> None:
    """A step reads one slot and writes another: it may be computed again, or go on in two ways."""
    (prompt,) = drawn(70)
    with closing(engine.executor(n_pages=4, n_slots=3)) as executor:
        first = replace(prompts_as_step([prompt[:64]]), states=StateSlots(i32([0]), i32([0])))
        whole = replace(prompts_as_step([prompt]), states=StateSlots(i32([2]), i32([2])))
        executor.run(whole)
        expected = executor.output("logits").copy()
        executor.run(first)
        for _ in range(2):
            rest = replace(
                prompts_as_step([prompt[64:]]), positions=i32(range(64, 70)), pages=i32([0, 1]),
                page_starts=i32([0, 2]), states=StateSlots(i32([0]), i32([1])),
            )  # fmt: skip
            executor.run(rest)
            assert (executor.output("logits") == expected).all()


@pytest.mark.parametrize(
    "before, behind, why",
    [
        ([0, 1], [2, 2], "write one slot"),
        ([0, 1], [1, 2], "reads a slot that another one writes"),
        ([0, 1], [2, 4], "does not exist"),
        ([0, -1], [2, 3], "does not exist"),
        ([0], [2, 3], "has 1 elements"),
        ([0, 1], [2], "has 1 elements"),
    ],
)
def test_slots_that_cannot_be(engine: Engine, before: list[int], behind: list[int], why: str) -> None:
    with closing(engine.executor(n_pages=4, n_slots=4)) as executor:
        step = prompts_as_step(drawn(5, 6))
        with pytest.raises(ExecutionError, match=why):
            executor.run(replace(step, states=StateSlots(i32(before), i32(behind))))
        executor.run(replace(step, states=StateSlots(i32([0, 1]), i32([0, 1]))))
        assert np.isfinite(last_logits(engine, executor, drawn(5, 6))).all()
