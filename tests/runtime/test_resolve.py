"""Request, then generation_config, then default; and every length and id is checked before anything is queued."""

import numpy as np
import pytest

from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import ResolvedParams, SamplingParams, check_prompt, resolve
from tests.runtime.fakes import LIMITS, VOCAB, limits

NOTHING = GenerationDefaults()
MODEL = GenerationDefaults(
    temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, eos_token_ids=(2, 3)
)


def resolved(params: SamplingParams, defaults: GenerationDefaults = NOTHING, n_prompt: int = 10) -> ResolvedParams:
    return resolve(params, defaults, LIMITS, n_prompt)


def test_the_order_of_precedence() -> None:
    names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
    plain, model = resolved(SamplingParams()), resolved(SamplingParams(), MODEL)
    assert plain.row[names].tolist() == [(1, 1, 0, 0, 1)] and not plain.needs_history
    assert model.row[names].tolist()[0] == pytest.approx((0.6, 0.9, 20, 0.1, 1.1)) and model.needs_history
    asked = resolved(SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0), MODEL)
    assert asked.row[names].tolist() == [(0, 1, 0, 0, 1)] and not asked.needs_history
    none = resolved(SamplingParams(repeat_last_n=0, presence_penalty=1.0), MODEL)
    assert none.row[names[-1:]].tolist() == [(1,)] and not none.needs_history, "a window of no token: no penalty"
    few, all_of_them = (resolved(SamplingParams(repeat_last_n=n), MODEL) for n in (8, -1))
    assert (few.penalty_window, all_of_them.penalty_window, model.penalty_window) == (8, None, None)
    assert model.eos_token_ids == {2, 3} and not resolved(SamplingParams(ignore_eos=True), MODEL).eos_token_ids


@pytest.mark.parametrize(("asked", "used"), [(-1, 0), (0, 0), (5, 5), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (10**12, 0)])
def test_top_k_of_everything_is_off(asked: int, used: int) -> None:
    assert resolved(SamplingParams(top_k=asked)).row["top_k"] == used


def test_max_tokens_unset_is_the_rest_of_the_context() -> None:
    assert resolved(SamplingParams(), n_prompt=100).max_tokens == 28
    assert resolved(SamplingParams(max_tokens=28), n_prompt=100).max_tokens == 28
    with pytest.raises(RequestError, match="has 100 tokens and max_tokens of 29") as error:
        resolved(SamplingParams(max_tokens=29), n_prompt=100)
    assert error.value.param == "max_tokens" and "at most 28" in error.value.fix and "128" in error.value.expected


def test_a_pool_smaller_than_the_context_is_the_context() -> None:
    small = limits(n_pages=5, page_tokens=4)
    assert small.context_tokens == 20
    with pytest.raises(RequestError, match="the prompt has 20 tokens"):
        check_prompt([1] * 20, small)


def test_a_seed_is_kept_or_drawn() -> None:
    assert resolved(SamplingParams(seed=-5)).seed == -5
    drawn = {resolved(SamplingParams()).seed for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= s < 2**53 for s in drawn), "every client can send it back"


def test_logprobs_none_is_none_and_zero_is_the_chosen_one() -> None:
    assert resolved(SamplingParams()).n_top is None
    assert resolved(SamplingParams(logprobs=0)).n_top == 0
    assert resolve(SamplingParams(logprobs=20), NOTHING, limits(vocab_size=7), 1).n_top == 7


def test_bias_is_sorted_and_inside_the_vocabulary() -> None:
    biased = resolved(SamplingParams(logit_bias={9: 1.0, 3: -2.0}))
    assert biased.bias_ids.tolist() == [3, 9] and biased.bias_values.tolist() == [-2.0, 1.0]
    assert biased.bias_ids.dtype == np.int32 and biased.bias_values.dtype == np.float32


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (SamplingParams(stop_token_ids=[-1]), "stop_token_ids"),
        (SamplingParams(stop_token_ids=["a"]), "stop_token_ids"),  # type: ignore[list-item]
        (SamplingParams(max_tokens=3, min_tokens=4), "min_tokens"),
        (SamplingParams(min_tokens=119), "min_tokens"),
    ],
)
def test_what_the_engine_cannot_do_names_its_field(params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError) as error:
        resolved(params)
    assert error.value.param == field


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([], "no tokens"),
        ([1] * 128, "the prompt has 128 tokens"),
        ([1, VOCAB], f"prompt token 1 is {VOCAB}"),
        ([-1], "prompt token 0 is -1"),
        ([2**40], "prompt token 0 is"),
        ([2**80], "not a list of token ids"),
        ([1.5], "not a list of token ids"),
        (["a"], "not a list of token ids"),
        ([True], "not a list of token ids"),
        ([[1]], "not a list of token ids"),
        ([[1], [1, 2]], "not a list of token ids"),
        ([None], "not a list of token ids"),
    ],
)
def test_a_prompt_that_is_none(prompt: list[int], what: str) -> None:
    with pytest.raises(RequestError, match=what) as error:
        check_prompt(prompt, LIMITS)
    assert error.value.param == "prompt"


def test_a_prompt_is_copied_and_cannot_be_changed() -> None:
    mine = np.array([1, 2, 3], dtype=np.int32)
    prompt = check_prompt(mine, LIMITS)
    mine[0] = 9
    assert prompt.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 4
