"""What was asked and what is made of it: the key in the cache is the same exactly where the engines are."""

import re
from dataclasses import replace

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, resolve_options
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from tests.support.checkpoints import random_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.from_checkpoint(Checkpoint.open(random_checkpoint(tmp_path_factory.mktemp("c"), "qwen3", seed=3)))


def made(source: Source, options: BuildOptions) -> tuple[object, ...]:
    """All that the engine's content follows from."""
    plan = plan_engine(source, options)
    weights = [(w.origin, w.format, w.shape) for w in plan.program.weights]
    return plan.program.encoded(), weights, plan.program.caches, plan.program.symbols, plan.program.outputs


def asked(precision: object = None, group: int = 128, head: str | None = None, **others: object) -> BuildOptions:
    chosen = None if precision is None else precision_map(precision, group, head)  # type: ignore[arg-type]
    return BuildOptions(precision=chosen, **others)  # type: ignore[arg-type]


F32, BF16, INT8, FP8, INT4 = KvFormat
EQUAL = (
    (asked(), asked("fp32")),
    (asked("fp32"), asked("fp32", group=64)),
    (asked("fp32"), asked("fp32", kv_format=F32)),
    (asked("bf16"), asked("bf16", kv_format=BF16)),
    (asked("fp32"), asked("fp32", tiles=True)),
    (asked("w8a8", kv_format=F32), asked("w8a8", kv_format=F32, tiles=True)),
    (asked("w8a8", head="bf16"), asked({"default": "w8a8", "lm_head": "bf16"})),
    (asked("w4a16"), asked({"default": "w4a16", "lm_head": "w8a16"})),
    (asked("w8a8", 64), asked("w8a8:64", 64)),
    (asked("w4a8:32"), asked({"default": "w4a8:32", "lm_head": "w8a8:32"})),
)
DIFFERENT = (
    (asked("fp32"), asked("bf16")),
    (asked("w8a8"), asked("w8a8", group=64)),
    (asked("fp32", head="w8a8"), asked("fp32", 64, "w8a8")),
    (asked("bf16"), asked("bf16", tiles=True)),
    (asked("w8a8"), asked("w8a8", tiles=True)),
    (asked("fp32"), asked("fp32", kv_format=INT8)),
    (asked("fp32", kv_format=FP8), asked("fp32", kv_format=INT8)),
    (asked("fp32", kv_format=INT4), asked("fp32", kv_format=INT8)),
    (asked("w4a8"), asked("w4a8", head="w4a8")),
    (asked("w8a8"), asked({"default": "w8a8", "layers.1.*": "bf16"})),
    (asked("w8a8"), asked("w8a8:32")),
    (asked("w8a8:32"), asked("w8a8:64")),
    (asked("w8a8:32"), asked({"default": "w8a8:32", "layers.1.*": "w8a8"})),
    (asked("fp32"), asked("fp32", max_batch=4)),
    (asked("fp32"), asked("fp32", max_step_tokens=64)),
    (asked("fp32"), asked("fp32", fuse=False)),
    (asked("fp32"), asked("fp32", keep=("model.layers.0",))),
)


@pytest.mark.parametrize(("one", "other", "same"), [(*c, True) for c in EQUAL] + [(*c, False) for c in DIFFERENT])
def test_keys_are_equal_exactly_where_engines_are(
    source: Source, one: BuildOptions, other: BuildOptions, same: bool
) -> None:
    assert (made(source, one) == made(source, other)) is same
    assert (resolve_options(source, one).key == resolve_options(source, other).key) is same


def test_a_key_names_no_class(source: Source) -> None:
    """Otherwise a class with another name would be another engine, and the cache would be built anew."""
    key = resolve_options(source, asked({"default": "w8a8:32", "layers.1.*": "bf16"}, keep=("model.layers.0",))).key
    assert not re.search(r"[A-Z]\w*\(|<\w+\.", key), key


def test_another_context_is_another_engine(source: Source) -> None:
    longer = replace(source, max_context=source.max_context + 1)
    assert resolve_options(source, asked()).key != resolve_options(longer, asked()).key
