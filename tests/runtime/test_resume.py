"""Answers that continue behind tokens which were delivered before are those that were never interrupted."""

import random
from typing import Any

import numpy as np
import pytest

from millrace.api.offline_generate import RequestOutput, generate
from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output import grammar_limits
from tests.runtime.fakes import EOS, VOCAB, limits, make_loop

PROMPT = [5, 6, 7, 8, 9, 10]


def answered(params: SamplingParams, prompt: Any, **of: int) -> RequestOutput:
    loop = make_loop(limits(**of))
    (output,) = generate(loop, [prompt], [params])
    return output


def drawn_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        n=draw.choice((1, 1, 3)), seed=draw.randrange(1000), temperature=draw.choice((0, 1)), max_tokens=30,
        min_tokens=draw.choice((0, 0, 12)), ignore_eos=draw.random() < 0.5,
        stop=draw.choice(((), (), ("e",), ("ab", "th"))), logprobs=draw.choice((None, 0)),
        frequency_penalty=draw.choice((0, 0.5)), repetition_penalty=draw.choice((1, 1.2)),
        repeat_last_n=draw.choice((None, 8)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_follows_is_what_would_have_followed(seed: int) -> None:
    """Cut at random in each choice, with pages so few that some are computed again."""
    draw = random.Random(seed)
    params, prompt = drawn_params(draw), [draw.randrange(1, VOCAB - 1) for _ in range(draw.randrange(1, 40))]
    whole = answered(params, prompt, n_pages=40)
    cuts = [draw.randrange(len(choice.token_ids)) for choice in whole.outputs]
    delivered = [choice.token_ids[:cut] for choice, cut in zip(whole.outputs, cuts, strict=True)]
    rest = answered(params, {"prompt_token_ids": prompt, "resume_token_ids": delivered}, n_pages=draw.choice((40, 64)))
    for before, choice, cut in zip(whole.outputs, rest.outputs, cuts, strict=True):
        assert choice.token_ids == before.token_ids[cut:]
        assert before.text.endswith(choice.text)
        assert (choice.finish_reason, choice.stop_reason) == (before.finish_reason, before.stop_reason)
        if before.logprobs is not None:
            assert choice.logprobs == before.logprobs[cut:]


@pytest.mark.parametrize("cut", range(5))
def test_under_a_grammar(cut: int) -> None:
    params = SamplingParams(
        seed=3, temperature=1, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[a-e]{4}(f|g)h{0,5}")
    )
    whole = answered(params, PROMPT).outputs[0]
    delivered = whole.token_ids[:cut]
    rest = answered(params, {"prompt_token_ids": PROMPT, "resume_token_ids": delivered}).outputs[0]
    assert rest.token_ids == whole.token_ids[cut:] and whole.text.endswith(rest.text) and whole.finish_reason == "stop"


def test_a_lexer_that_others_wore_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one grammar share a lexer, which has a bound on its states; each may be resumed all the same."""
    monkeypatch.setattr(grammar_limits, "LEXER_STATES", 150)
    asked = StructuredOutputsParams(regex="(a|b)*a(a|b){100}")
    each = [SamplingParams(max_tokens=30, seed=seed, temperature=1, structured_outputs=asked) for seed in range(8)]
    whole = [answered(params, PROMPT).outputs[0].token_ids for params in each]
    prompts: list[Any] = [{"prompt_token_ids": PROMPT, "resume_token_ids": ids[:22]} for ids in whole]
    found = generate(make_loop(limits()), prompts, each)
    assert [o.outputs[0].token_ids for o in found] == [ids[22:] for ids in whole]


GRAMMAR = StructuredOutputsParams(regex="[a-e]{4}")


@pytest.mark.parametrize(("given", "params", "why"), [
    ([7, VOCAB], {}, f"has token {VOCAB} at index 1\n  expected: ids from 0 to {VOCAB - 1}"),
    ([7, -1], {}, "has token -1"),
    ([7] * 5, {"max_tokens": 5}, "has 5 tokens\n  expected: fewer than max_tokens, which is 5"),
    ([7] * 10**6, {}, "has 1000000 tokens"),
    ([7, EOS, 8], {}, f"has tokens after token {EOS} at index 1, which ends the answer"),
    ([7, 9], {"stop_token_ids": (9,)}, "ends with token 9 at index 1"),
    ([[7], [8]], {}, "has token ids for 2 choices\n  expected: one list per choice, n = 1"),
    ([7], {"n": 2}, "has token ids for 1 choices\n  expected: one list per choice, n = 2"),
    (["7"], {}, "is not a list of token ids"),
    ([[7], 8], {}, "is not a list of token ids"),
    ("78", {}, "is not a list of token ids"),
    ([True], {}, "is not a list of token ids"),
    ([7, 8], {"structured_outputs": GRAMMAR}, "at index 0, which the structured output of this request does not allow"),
])  # fmt: skip
def test_what_cannot_be_continued(given: Any, params: dict[str, Any], why: str) -> None:
    loop = make_loop(limits())
    with pytest.raises(RequestError) as refused:
        generate(loop, [{"prompt_token_ids": PROMPT, "resume_token_ids": given}], [SamplingParams(seed=1, **params)])
    assert why in str(refused.value) and refused.value.param == "resume_token_ids"
    assert not loop.step(), "nothing was queued"


def test_delivered_tokens_are_no_cached_prompt() -> None:
    """They are found in the prefix cache after an answer was cut off; usage counts the prompt alone."""
    loop, params = make_loop(limits()), SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    prompt = list(range(1, 20))
    whole = generate(loop, [prompt], params)[0].outputs[0].token_ids
    asked: Any = {"prompt_token_ids": prompt, "resume_token_ids": whole[:50]}
    (rest,) = generate(loop, [asked], params)
    assert rest.outputs[0].token_ids == whole[50:] and rest.num_cached_tokens == len(prompt)
    assert loop.stats().prefix_hits_total <= loop.stats().prefix_queries_total


def test_scores_of_the_prompt_came_before() -> None:
    asked: Any = {"prompt_token_ids": PROMPT, "resume_token_ids": [7]}
    with pytest.raises(RequestError, match="together with prompt_logprobs"):
        answered(SamplingParams(prompt_logprobs=1), asked)


def test_an_empty_list_resumes_nothing() -> None:
    ways: list[Any] = [None, [], [[]], [[], []], np.array([], np.int32)]
    for given in ways:
        n = 2 if str(given) == "[[], []]" else 1
        params = SamplingParams(seed=1, max_tokens=4, n=n)
        assert (
            answered(params, {"prompt_token_ids": PROMPT, "resume_token_ids": given}).outputs
            == answered(params, PROMPT).outputs
        )


def test_a_stop_string_among_them_ends_the_answer() -> None:
    whole = answered(SamplingParams(seed=5, temperature=1, max_tokens=20, ignore_eos=True), PROMPT).outputs[0]
    stop = whole.text[4:6]
    params = SamplingParams(seed=5, temperature=1, max_tokens=20, ignore_eos=True, stop=(stop,))
    with pytest.raises(RequestError, match="has the stop string"):
        answered(params, {"prompt_token_ids": PROMPT, "resume_token_ids": whole.token_ids[:-1]})
