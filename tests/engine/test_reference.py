"""The native executor against the reference executor, on graphs before and after the passes, on mixed steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions
from millrace.compile.passes.pipeline import pipeline, run_passes, unfused
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.engine.executor import SAMPLING, ExecutorLimits, StepInputs, WindowLimits
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.kernels.catalogue import operators
from millrace.kernels.sample.ref import uniform
from millrace.model.module import trace_model
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.engines import build, last_logits, prompts_as_step
from tests.support.gguf_files import BLOCKY, KindOf, write_gguf
from tests.support.one_step import i32, packed

LIMITS = ExecutorLimits(
    max_step_tokens=256, max_sequences=8, max_rows=40, max_context=256, page_tokens=64, n_pages=16, vocab_size=1003
)


def reference(
    folder: Path, precision: str, fused: bool, kv: KvFormat | None = None, head: str | None = None
) -> ReferenceExecutor:
    source = Source.from_checkpoint(Checkpoint.open(folder))
    options = BuildOptions(precision=precision_map(precision, group=32, head=head))
    assert options.precision
    passes = pipeline(options.precision) if fused else unfused(options.precision)
    graph = run_passes(trace_model(source.module, source.weights, operators()), passes)
    own = KvFormat.F32 if precision == "fp32" else KvFormat.BF16
    windows = sorted({tokens for node in graph.nodes if isinstance(tokens := node.attrs.get("window"), int)})
    has_states = any(node.op == "short_conv" for node in graph.nodes)
    limits = replace(
        LIMITS, windows=tuple(WindowLimits(tokens, LIMITS.n_pages) for tokens in windows),
        n_slots=LIMITS.max_sequences if has_states else 0,
    )  # fmt: skip
    return ReferenceExecutor(graph, limits, kv=own if kv is None else kv, bf16_table=precision != "fp32")


def shaken(executor: ReferenceExecutor, seed: int) -> ReferenceExecutor:
    """Its norms changed by what a float32 sum of some hundred products loses: two correct engines differ like this."""
    rng = np.random.default_rng(seed)
    for value, array in executor.interpreter.constants.items():
        if value.constant and "norm" in value.constant.origin[0]:
            array *= 1 + rng.choice([-1, 1], array.shape) * 2.0**-20
    return executor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16", "w4a8", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("w8a8", "w8a16", "fp8a16"))],
)
def test_logits_agree(family: str, precision: str, tmp_path: Path) -> None:
    assert_agree(random_checkpoint(tmp_path / "checkpoint", family, seed=5), precision, tmp_path)


def mixed(name: str) -> Kind:
    return {"output.weight": Kind.Q5_1, "blk.0.attn_v.weight": Kind.Q6_K}.get(name, Kind.Q4_1)


def halves(name: str) -> Kind:
    """Types of which NumPy knows no common one, in a product that is made of several."""
    return Kind.BF16 if "attn_k" in name else Kind.F16


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (Kind.Q4_0, "w4a8"), (Kind.Q8_0, "w8a8"), (Kind.Q4_1, "w4a16"), (Kind.Q4_K, "w4a8"), (Kind.Q6_K, "w8a16"),
        (mixed, "w4a8"), (halves, "fp32"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
            (Kind.Q4_0, "w4a16"), (Kind.Q5_1, "w8a8"), (Kind.Q6_K, "w8a8"), (Kind.Q5_K, "w4a8"), (mixed, "w8a8"),
        )),
    ],
)  # fmt: skip
def test_logits_of_a_quantised_file_agree(kind: Kind | KindOf, precision: str, tmp_path: Path) -> None:
    """Its own integers in both, or the same rounding of them."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=5, **{**BLOCKY, "vocab_size": 1003})
    assert_agree(write_gguf(tmp_path / "m.gguf", folder, kind), precision, tmp_path)


@pytest.mark.parametrize(("precision", "kind"), [("w4a8:8", None), ("w8a8:16", None), ("w4a8:16", Kind.Q4_1)])
def test_logits_with_groups_of_activations_agree(precision: str, kind: Kind | None, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=5, **{**BLOCKY, "vocab_size": 1003})
    assert_agree(write_gguf(tmp_path / "m.gguf", folder, kind) if kind else folder, precision, tmp_path)


@pytest.mark.parametrize(
    ("precision", "kv"),
    [
        ("fp32", KvFormat.INT8),
        ("fp32", KvFormat.BF16),
        ("w4a8", KvFormat.INT8),
        ("bf16", KvFormat.F32),
        ("fp32", KvFormat.FP8),
    ],
)
def test_logits_over_another_kv_cache_agree(precision: str, kv: KvFormat, tmp_path: Path) -> None:
    assert_agree(random_checkpoint(tmp_path / "checkpoint", "qwen2", seed=5), precision, tmp_path, kv)


def test_logits_of_a_head_in_two_steps_agree(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=5)
    assert_agree(folder, "w4a8", tmp_path, head="w4a8")


def assert_agree(
    folder: Path, precision: str, tmp_path: Path, kv: KvFormat | None = None, head: str | None = None
) -> None:
    """Roundings flip codes, and flips grow through the layers: the tolerance is what flips do to the reference."""
    engine = build(folder, tmp_path / "engine", precision, group=32, kv=kv, head=head)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 1003, n).tolist() for n in (3, 40)]
    executor = engine.executor(n_pages=16)
    got = last_logits(engine, executor, prompts)
    executor.close()
    step = prompts_as_step(prompts)
    exact, plain = (reference(folder, precision, fused, kv, head).logits(step) for fused in (True, False))
    flips = [
        np.abs(shaken(reference(folder, precision, True, kv, head), s).logits(step) - exact).max() for s in range(3)
    ]
    tolerance = 3 * max(*flips, np.abs(plain - exact).max()) + 4e-6 * np.abs(exact).max()
    assert np.abs(got - exact).max() <= tolerance


@pytest.mark.parametrize("family", ["llama", "gemma", "lfm2"])
def test_rows_and_rotary_positions_agree(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", family, seed=5)
    executor = build(folder, tmp_path / "engine", "fp32").executor(n_pages=16)
    step, rng = prompts_as_step([[5, 6, 7, 8], [9] * 70]), np.random.default_rng(1)
    tokens = step.tokens.copy()
    tokens[[1, 40]] = -2, -1
    rows = rng.standard_normal((2, 320)).astype(np.float32)
    rotary = rng.integers(0, 200, len(tokens)).astype(np.int32)
    step = replace(step, tokens=tokens, embeddings=rows, rotary_positions=rotary)
    executor.run(step)
    got: Any = executor.output("logits").copy()
    executor.close()
    expected: Any = reference(folder, "fp32", True).logits(step)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_steps_sample_alike(tmp_path: Path) -> None:
    """A prompt in two chunks beside a decoding sequence, with penalties and filters: the same tokens from both."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=6)
    executor = build(folder, tmp_path / "engine", "fp32").executor(n_pages=16)
    exact = reference(folder, "fp32", fused=False)
    first = prompts_as_step([[5, 6, 7], list(range(100, 140))])
    rows = np.zeros(2, SAMPLING)
    rows["token"], rows["seed"], rows["position"], rows["n_top"], rows["target"] = (
        [0, 40],
        [7, 2**63 + 5],
        [3, 80],
        4,
        -1,
    )
    rows["temperature"], rows["top_p"], rows["top_k"], rows["repetition_penalty"] = 0.8, 0.9, 50, 1.2
    rows["history_start"], rows["history_prompt"], rows["history_output"] = [0, 0], [2, 0], [1, 0]
    second = StepInputs(
        i32([9, *range(200, 240)]), i32([3, *range(40, 80)]), i32([0, 1, 41]), i32([0, 1, 2]), i32([0, 1, 3]), rows,
        i32([5, 6, 7]), i32([]), np.zeros(0, np.float32),
    )  # fmt: skip
    allowed = np.random.default_rng(8).random((2, 1003)) < 0.1
    masked_rows = rows.copy()
    masked_rows["mask"] = [2, 1]
    masked = replace(second, sampling=masked_rows, masks=packed(*allowed))
    for step in (replace(first), second, masked):
        ours, theirs = executor.run(step), exact.run(step)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.top_ids.tolist() == theirs.top_ids.tolist() and ours.ranks[-1] in (0, theirs.ranks[-1])
        if step.masks is not None:
            assert allowed[[1, 0], ours.tokens].all() and ours.ranks.tolist() == theirs.ranks.tolist()
        if len(step.history):
            assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    executor.close()


@pytest.mark.parametrize("kv", KvFormat)
def test_a_copied_page_has_the_bits_of_a_computed_one(kv: KvFormat, tmp_path: Path) -> None:
    """Of a page that goes on otherwise, 30 tokens are taken over, in both executors; its other 34 mean nothing."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=6)
    native = build(folder, tmp_path / "engine", "fp32", kv=kv).executor(n_pages=16)
    known, rest = list(range(100, 170)), list(range(300, 350))

    def last_of(tokens: list[int], first: int, pages: list[int], copies: list[list[int]] | None = None) -> StepInputs:
        row = np.zeros(1, SAMPLING)
        row["token"], row["position"], row["n_top"], row["target"] = len(tokens) - 1, first + len(tokens), 8, -1
        row["top_p"], row["repetition_penalty"] = 1, 1
        empty = i32([])
        return StepInputs(
            i32(tokens), i32(range(first, first + len(tokens))), i32([0, len(tokens)]), i32(pages),
            i32([0, len(pages)]), row, empty, empty, np.zeros(0, np.float32),
            copies=None if copies is None else i32(copies),
        )  # fmt: skip

    for executor in (native, reference(folder, "fp32", fused=False, kv=kv)):
        executor.run(last_of(known, 0, [3, 4]))
        plain = executor.run(last_of(known[:30] + rest, 0, [7, 8]))
        copied = executor.run(last_of(rest, 30, [9, 5], [[3, 9]]))
        lost = executor.run(last_of(rest, 30, [11, 12]))
        for of, equal in ((copied, True), (lost, False)):
            assert (of.top_logprobs.tobytes() == plain.top_logprobs.tobytes()) == equal
        again = executor.run(last_of([known[69]], 69, [3, 4]))
        assert again.tokens == executor.run(last_of(known, 0, [13, 14])).tokens, "the source is as it was"
        executor.close()


def test_philox_is_the_published_one() -> None:
    """Random123's known answer for philox4x32-10: counter and key all ones bits -> 408f276d 41c83b0e ..."""
    ones = 2**32 - 1
    # our counter leaves its upper half at zero, so the known answer of all zeros is the one that applies:
    assert uniform(0, 0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) * 2.0**-53
    assert uniform(ones << 32 | ones, 3, 9) != uniform(ones, 3, 9)
