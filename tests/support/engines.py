"""Engines for tests: built from a checkpoint folder in memory's worth of time, run step by step, logits at hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat
from millrace.engine.executor import SAMPLING, StepInputs
from millrace.engine.native.executor import NativeExecutor
from tests.support.one_step import i32


def build(
    folder: Path, out: Path, precision: str | None, *, fuse: bool = True, group: int = 128, max_step_tokens: int = 256,
    kv: KvFormat | None = None, head: str | None = None,
) -> Engine:  # fmt: skip
    """precision: a numerics class; "bf16 by tiles" for the sums of AMX; None: the checkpoint's own; head: its own"""
    checkpoint = Checkpoint.open(folder)
    name, _, sums = (precision or "").partition(" by ")
    options = BuildOptions(
        precision=precision_map(name, group, head) if name else None,
        tiles=sums == "tiles",
        max_batch=8,
        max_step_tokens=max_step_tokens,
        fuse=fuse,
        kv_format=kv,
    )
    source = Source.from_checkpoint(checkpoint)
    write_engine(source, plan_engine(source, options), out, name="test")
    return Engine.open(out)


def prompts_as_step(prompts: Sequence[Sequence[int]]) -> StepInputs:
    """Whole prompts, one greedy row each."""
    lengths = [len(p) for p in prompts]
    pages = [-(-n // PAGE_TOKENS) for n in lengths]
    sampling = np.zeros(len(prompts), SAMPLING)
    sampling["token"], sampling["target"] = np.cumsum(lengths) - 1, -1
    sampling["top_p"], sampling["repetition_penalty"], sampling["n_top"] = 1, 1, -1
    return StepInputs(
        tokens=i32([t for p in prompts for t in p]),
        positions=i32([i for n in lengths for i in range(n)]),
        starts=i32([0, *np.cumsum(lengths)]),
        pages=i32(range(sum(pages))),
        page_starts=i32([0, *np.cumsum(pages)]),
        sampling=sampling,
        history=i32([]),
        bias_ids=i32([]),
        bias_values=np.zeros(0, np.float32),
    )


def last_logits(engine: Engine, executor: NativeExecutor, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """(prompts, vocabulary): the logits behind the last token of each prompt."""
    executor.run(prompts_as_step(prompts))
    return executor.output("logits").astype(np.float32)
