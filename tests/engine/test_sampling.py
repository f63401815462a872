"""Sampling in the step call against NumPy in float64: the right set is kept, penalties and log probabilities
agree, draws follow the distribution and depend on (seed, choice, position) alone."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, ExecutionError, StepInputs, StepOutputs
from millrace.engine.io_slots import Slot
from millrace.engine.native.executor import NativeExecutor, NativeProgram
from millrace.graph.types import DType, Symbol
from millrace.kernels.declare import Space
from millrace.kernels.encode import Ref, encode
from millrace.kernels.library import usable_isas
from millrace.kernels.sample.ref import penalised, probabilities, uniform
from tests.support.one_step import i32, packed

V = 1500
ROWS = 64


class Sampler:
    """An executor whose logits are given: row r samples from the table's row tokens[r], or all from its only row."""

    def __init__(self, logits: NDArray[np.float32], isa: str, threads: int = 2) -> None:
        vocab, out = logits.shape[1], Ref(Space.ACTIVATIONS, 4 * ROWS)
        if len(logits) == 1:
            params: dict[str, Any] = {"rows": 2, "n": vocab, "a_stride": 0}
            calls, table = encode("elementwise", {"a": Ref(Space.WEIGHTS, 0), "y": out}, params), logits
        else:
            params = {"rows": 0, "n": vocab, "vocab": max(len(logits), vocab), "bf16": 0, "scale": 1.0}
            tokens = Ref(Space.ACTIVATIONS, 0)
            calls = encode("embed", {"ids": tokens, "table": Ref(Space.WEIGHTS, 0), "y": out}, params)
            table = np.zeros((params["vocab"], vocab), np.float32)
            table[: len(logits)] = logits
        program = NativeProgram(
            calls=calls, n_calls=1, weights=np.ascontiguousarray(table).reshape(-1).view(np.uint8),
            weights_bytes=table.nbytes, activation_bytes=ROWS * (vocab + 1) * 4,
            symbols=dict.fromkeys(map(Symbol, "TSR"), ROWS),
            inputs=(Slot("tokens", (Symbol("T"),), DType.I32, 0),),
            outputs=(Slot("logits", (Symbol("R"), vocab), DType.F32, 4 * ROWS),),
        )  # fmt: skip
        self.executor = NativeExecutor(
            program, n_pages=0, max_context=1 << 20, vocab_size=vocab, threads=threads, isa=isa
        )

    def __call__(self, tokens: list[int], *, history: list[int] | None = None, **fields: Any) -> StepOutputs:
        rows = np.zeros(len(tokens), SAMPLING)
        rows["token"], rows["target"] = np.arange(len(tokens)), -1
        plain = {"top_p": 1, "repetition_penalty": 1, "temperature": 1, "n_top": -1}
        bias, masks, ready = fields.pop("bias", {}), fields.pop("masks", None), fields.pop("ready", None)
        for name, value in {**plain, **fields, "bias_count": len(bias)}.items():
            rows[name] = value
        step = StepInputs(
            i32(tokens), i32(np.zeros(len(tokens))), i32(range(len(tokens) + 1)), i32([]),
            i32(np.zeros(len(tokens) + 1)), rows, i32(history or []), i32(list(bias)),
            np.array(list(bias.values()), np.float32), masks, ready,
        )  # fmt: skip
        return self.executor.run(step)

    def many(self, n: int, **fields: Any) -> NDArray[np.int32]:
        """n draws from row 0 at positions 0, 1, ..."""
        drawn = [self([0] * ROWS, position=np.arange(at, at + ROWS), **fields).tokens for at in range(0, n, ROWS)]
        return np.concatenate(drawn)


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows(seed: int, spread: float = 3, n: int = 2, vocab: int = V) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * spread).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1003, 4096, 4097, V])
def test_greedy_takes_the_first_largest(vocab: int, isa: str) -> None:
    x = rows(1, vocab=vocab)
    x[0, [vocab // 2, vocab - 1]] = 99
    sample = Sampler(x, isa)
    assert sample([0, min(1, vocab - 1)], temperature=0).tokens.tolist()[0] == vocab // 2


FILTERS: list[dict[str, float]] = [
    {}, {"temperature": 0.3}, {"temperature": 2.5}, {"top_k": 1}, {"top_k": 7}, {"top_k": V + 5}, {"top_p": 0.5},
    {"top_p": 0.999}, {"top_p": 1e-6}, {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
]  # fmt: skip


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.001, 1, 6, 400])
def test_draws_follow_the_distribution(fields: dict[str, float], spread: float) -> None:
    """Only kept tokens are drawn, and the frequencies of heads and tails are what they should be (five sigmas)."""
    x = rows(7, spread)
    drawn = Sampler(x, usable_isas()[0]).many(4096, seed=11, **fields)
    p = probabilities(x[0], **fields)  # type: ignore[arg-type]
    assert (p[drawn] > 0).all(), "a token was drawn that the filter drops"
    head = np.argsort(-p)[: max(1, int((p > 0).sum()) // 3)]
    expected = p[head].sum()
    sigma = np.sqrt(max(expected * (1 - expected), 1e-9) / len(drawn))
    assert abs(np.isin(drawn, head).mean() - expected) < 5 * sigma + 1e-6


LARGE: list[dict[str, float]] = [
    {"top_p": 0.9}, {"top_p": 0.1}, {"top_k": 1000}, {"top_k": 7}, {"top_k": 60000, "top_p": 0.7},
    {"min_p": 0.05, "top_p": 0.99},
]  # fmt: skip


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fields", LARGE, ids=str)
@pytest.mark.parametrize(
    "spread", [0.0, 0.5, 4, *(pytest.param(x, marks=pytest.mark.nightly) for x in (0.001, 1, 400))]
)
def test_a_large_vocabulary_keeps_the_right_set(fields: dict[str, float], spread: float) -> None:
    """Where a sample of the logits guesses the threshold; also when all are equal, or the likely ones lie together."""
    x = np.sort(rows(21, spread, n=1, vocab=151936), axis=1) if spread == 4 else rows(21, spread, n=1, vocab=151936)
    best, *others = usable_isas()[:2]
    drawn = Sampler(x, best).many(2 * ROWS, seed=4, **fields)
    p = probabilities(x[0], **fields)  # type: ignore[arg-type]
    assert (p[drawn] > 0).all()
    uniforms = np.array([uniform(4, 0, at) for at in range(len(drawn))])
    share = np.cumsum(p)
    exact = np.minimum(np.searchsorted(share, uniforms, side="right"), len(p) - 1)
    # a tie that float32 decides the other way shifts the shares by one token's
    assert (np.abs(share[drawn] - share[exact]) <= 2 * p.max() + 1e-4).all(), "the right token"
    for isa in others:
        assert (Sampler(x, isa).many(ROWS, seed=4, **fields) == drawn[:ROWS]).all(), isa


@pytest.mark.parametrize("top_p", [0.3, 0.9, pytest.param(0.5, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("heavy", [[40], [40, 70000], [3]])
def test_tokens_that_outweigh_the_sample_are_not_missed(heavy: list[int], top_p: float) -> None:
    """The threshold is guessed from vectors 0, 16, ...; here the weight lies elsewhere, or all of it in the first."""
    x = rows(22, 0.5, n=1, vocab=151936)
    x[0, heavy] = [12.5, 12.4][: len(heavy)]
    best, *others = usable_isas()
    drawn = Sampler(x, best).many(2 * ROWS, seed=5, top_p=top_p)
    p = probabilities(x[0], top_p=top_p)
    assert (p[drawn] > 0).all()
    share = p[heavy].sum()
    assert abs(np.isin(drawn, heavy).mean() - share) < 5 * np.sqrt(share * (1 - share) / len(drawn)) + 1e-6
    for isa in others:
        assert (Sampler(x, isa).many(ROWS, seed=5, top_p=top_p) == drawn[:ROWS]).all(), isa


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_every_isa_draws_the_same(fields: dict[str, float]) -> None:
    x = rows(8)
    draws = [
        Sampler(x, isa, threads).many(256, seed=3, **fields).tolist() for isa in usable_isas() for threads in (1, 2)
    ]
    assert all(d == draws[0] for d in draws)


def test_ties_at_the_cut_go_to_the_lower_id(isa: str) -> None:
    x = np.zeros((1, V), np.float32)
    assert set(Sampler(x, isa).many(512, seed=1, top_k=3).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [50, 200])
def test_fewer_than_top_k_pass_min_p(top_k: int, isa: str) -> None:
    x = np.where(np.arange(300) < 100, np.float32(2), np.float32(0))[None].astype(np.float32)
    drawn = Sampler(x, isa).many(64, seed=1, temperature=1e-4, top_k=top_k, min_p=0.999)
    assert ((drawn >= 0) & (drawn < min(top_k, 100))).all()


def test_what_has_no_weight_is_not_drawn(isa: str) -> None:
    """The sum of a block, rounded, lies above what its tokens add up to, and u is nearly 1."""
    x = np.full((1, 2048), -1e9, np.float32)
    x[0, 0], x[0, 16:1008:16] = 0, np.log(6.1e-8)
    high = [p for p in (340567, 931642) if uniform(1, 0, p) > 1 - 3e-6]
    assert high
    out = Sampler(x, isa)([0] * len(high), position=np.array(high), seed=1, temperature=1)
    assert (x[0, out.tokens] > -100).all()


def test_logits_as_far_apart_as_floats_are(isa: str) -> None:
    x = np.linspace(-3e38, 3e38, 1000, dtype=np.float32)[None]
    assert set(Sampler(x, isa).many(64, seed=1, temperature=1, top_k=999).tolist()) == {999}


def test_the_key_is_seed_choice_position(isa: str) -> None:
    sample = Sampler(rows(9), isa)
    base = sample.many(64, seed=5).tolist()
    assert sample([0] * 10, seed=5, position=np.arange(10)).tokens.tolist() == base[:10], "the batch does not matter"
    assert sample.many(64, seed=6).tolist() != base
    assert sample.many(64, seed=5, choice=1).tolist() != base


def test_penalties_and_bias(isa: str) -> None:
    x = rows(10, spread=1)
    prompt, output = [3, 4, 4, 7], [4, 9, 9, 9]
    biased = x[0].copy()
    biased[20] += 5
    y = penalised(biased, i32(prompt), i32(output), 1.7, 0.5, 0.3)
    got = Sampler(x, isa).many(
        4096, seed=2, top_k=30, history=prompt + output, history_prompt=4, history_output=4, repetition_penalty=1.7,
        presence_penalty=0.5, frequency_penalty=0.3, bias={20: 5.0},
    )  # fmt: skip
    p = probabilities(y.astype(np.float32), top_k=30)
    assert (p[got] > 0).all()
    counts = np.bincount(got, minlength=V) / len(got)
    assert np.abs(counts - p).max() < 5 * np.sqrt(p.max() / len(got))


def test_log_probabilities_are_of_the_raw_distribution(isa: str) -> None:
    x = rows(12)
    out = Sampler(x, isa)([0, 1, 0], n_top=5, temperature=0.5, top_k=20, seed=[1, 2, 3], bias={8: 2.0})
    for r, row in enumerate([0, 1, 0]):
        wide = x[row].astype(np.float64)
        logp = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        best = np.lexsort((np.arange(V), -wide))[:5]
        assert out.top_ids[r].tolist() == best.tolist()
        assert np.allclose(out.top_logprobs[r], logp[best], atol=3e-6)
        assert abs(out.logprobs[r] - logp[out.tokens[r]]) < 3e-6
        assert out.ranks[r] == 1 + (x[row] > x[row, out.tokens[r]]).sum()


def test_a_given_token_is_scored_and_nothing_is_drawn(isa: str) -> None:
    x = rows(12)
    targets = [3, V - 1, 0]
    out = Sampler(x, isa)([0, 1, 1], n_top=2, temperature=0.5, seed=9, target=targets, bias={3: 50.0})
    assert out.tokens.tolist() == targets
    for r, (row, target) in enumerate(zip([0, 1, 1], targets, strict=True)):
        wide = x[row].astype(np.float64)
        logp = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        assert abs(out.logprobs[r] - logp[target]) < 3e-6
        assert out.ranks[r] == 1 + (x[row] > x[row, target]).sum()
        assert out.top_ids[r].tolist() == np.lexsort((np.arange(V), -wide))[:2].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_only_their_row(bad: float, isa: str) -> None:
    x = rows(13)
    x[1, V - 1] = bad
    tokens = Sampler(x, isa)([0, 1, 0], temperature=0).tokens
    assert tokens[1] == -1 and tokens[0] == tokens[2] == x[0].argmax()


def some(seed: int, n: int) -> NDArray[np.bool_]:
    """(V,) with n tokens that are allowed, the last among them."""
    allowed = np.zeros(V, np.bool_)
    allowed[np.random.default_rng(seed).permutation(V - 1)[: n - 1]] = True
    allowed[V - 1] = True
    return allowed


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 16, 17, 300, V - 1])
def test_only_what_a_mask_allows_is_drawn(n: int, fields: dict[str, float]) -> None:
    """From its own distribution: each draw is the token in whose share its random number falls."""
    x, allowed = rows(31), some(5, n)
    p = probabilities(np.where(allowed, x[0], -np.inf).astype(np.float32), **fields)  # type: ignore[arg-type]
    assert p[~allowed].max() == 0
    share, uniforms = np.cumsum(p), np.array([uniform(6, 0, at) for at in range(2 * ROWS)])
    exact = np.minimum(np.searchsorted(share, uniforms, side="right"), np.flatnonzero(p)[-1])
    draws = [Sampler(x, isa).many(2 * ROWS, seed=6, mask=1, masks=packed(allowed), **fields) for isa in usable_isas()]
    assert all((d == draws[0]).all() for d in draws), "every instruction set draws the same"
    assert (p[draws[0]] > 0).all()
    assert (draws[0] == exact).mean() > 0.98, "the right token, save where float32 rounds a share across the number"


def test_a_mask_that_allows_everything_changes_no_bit(isa: str) -> None:
    said: dict[str, Any] = {"n_top": 5, "seed": [1, 2, 3], "top_p": 0.9, "bias": {8: 2.0}}
    x = rows(32)
    masked = Sampler(x, isa)([0, 1, 0], mask=1, masks=packed(np.ones(V, np.bool_)), **said)
    plain = Sampler(x, isa)([0, 1, 0], **said)
    for name in ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs"):
        assert getattr(masked, name).tobytes() == getattr(plain, name).tobytes(), name


def test_log_probabilities_are_of_what_the_mask_allows(isa: str) -> None:
    """As vLLM gives them: the mask comes first, penalties and temperature do not count."""
    x, allowed = rows(33), some(7, 40)
    out = Sampler(x, isa)([0] * 3, n_top=5, temperature=2, seed=[1, 2, 3], bias={8: 2.0}, mask=1, masks=packed(allowed))
    wide = np.where(allowed, x[0].astype(np.float64), -np.inf)
    logp = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-wide)[:5]
    for r in range(3):
        assert out.top_ids[r].tolist() == best.tolist() and np.allclose(out.top_logprobs[r], logp[best], atol=3e-6)
        assert abs(out.logprobs[r] - logp[out.tokens[r]]) < 3e-6
        assert out.ranks[r] == 1 + (wide > wide[out.tokens[r]]).sum()


def test_alternatives_end_where_the_mask_does(isa: str) -> None:
    out = Sampler(rows(34), isa)([0, 0], n_top=4, mask=[1, 0], masks=packed(some(8, 2)))
    assert (out.top_ids[0, :2] >= 0).all() and out.top_ids[0, 2:].tolist() == [-1, -1] and (out.top_ids[1] >= 0).all()


def test_a_mask_beside_penalties_and_biases(isa: str) -> None:
    x, allowed, history = rows(35, spread=1), some(9, 60), [3, 4, V - 1, 4]
    biased = x[0].copy()
    biased[[3, 20]] += 5  # 3 and 20 may not come, whatever is added to them
    allowed[[3, 20]] = False
    y = penalised(biased, i32(history[:2]), i32(history[2:]), 1.7, 0.5, 0.3)
    p = probabilities(np.where(allowed, y, -np.inf).astype(np.float32))
    got = Sampler(x, isa).many(
        2048, seed=2, history=history, history_prompt=2, history_output=2, repetition_penalty=1.7, presence_penalty=0.5,
        frequency_penalty=0.3, bias={3: 5.0, 20: 5.0}, mask=1, masks=packed(allowed),
    )  # fmt: skip
    assert (p[got] > 0).all()
    assert np.abs(np.bincount(got, minlength=V) / len(got) - p).max() < 5 * np.sqrt(p.max() / len(got))


def test_a_mask_that_allows_nothing_fails_only_its_row(isa: str) -> None:
    x = rows(36)
    masks = packed(np.zeros(V, np.bool_), some(10, 3))
    assert masks[0, -1], "what lies behind the vocabulary allows nothing"
    tokens = Sampler(x, isa)([0, 1, 1], mask=[1, 2, 0], temperature=0, masks=masks).tokens
    assert tokens[0] == -2 and some(10, 3)[tokens[1]] and tokens[2] == x[1].argmax()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_wait_for_masks_that_another_thread_fills(isa: str, threads: int) -> None:
    """As long as it takes; what the masks were before that does not count, and rows without one do not wait."""
    x, allowed = rows(39), some(12, 4)
    masks, ready, sample = packed(np.zeros(V, np.bool_)), np.zeros(1, np.int32), Sampler(x, isa, threads)
    assert sample([0, 1], masks=masks, ready=ready, temperature=0).tokens.tolist() == x.argmax(axis=1).tolist()

    def fill() -> None:
        time.sleep(0.05)
        masks[:] = packed(allowed)
        ready[0] = 1

    filling, began_s = threading.Thread(target=fill), time.perf_counter()
    filling.start()
    tokens = sample([0, 1], mask=[1, 0], masks=masks, ready=ready, temperature=0).tokens
    assert time.perf_counter() - began_s > 0.05
    filling.join()
    assert tokens.tolist() == [int(np.where(allowed, x[0], -np.inf).argmax()), int(x[1].argmax())]


def test_a_mask_hides_no_logit_that_is_not_finite(isa: str) -> None:
    x, allowed = rows(37), some(11, 9)
    x[0, np.flatnonzero(~allowed)[100]] = np.nan
    assert Sampler(x, isa)([0, 1], mask=1, masks=packed(allowed)).tokens.tolist()[0] == -1


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": 2}, {"mask": -1}, {"mask": 1, "masks": None}, {"mask": 1, "target": 3, "n_top": 0},
        {"masks": packed(np.ones(V, np.bool_))[:, :-1]}, {"masks": packed(np.ones(V, np.bool_)).astype(np.int64)},
        {"masks": packed(np.ones(V, np.bool_))[0]}, {"masks": np.asfortranarray(packed(*[np.ones(V, np.bool_)] * 2))},
    ],
    ids=["beyond", "below", "of none", "of a score", "short", "of another type", "one row", "by columns"],
)  # fmt: skip
def test_illegal_masks_are_refused(fields: dict[str, Any]) -> None:
    sample, good = Sampler(rows(38), usable_isas()[0]), packed(np.ones(V, np.bool_))
    with pytest.raises(ExecutionError, match="mask"):
        sample([0], **{"masks": good, **fields})
    assert sample([0], mask=1, masks=good, temperature=0).tokens.tolist() == [int(rows(38)[0].argmax())]
