"""The prefix cache of a real engine, from Python: on by default, off by either name."""

from typing import Any

import pytest

from millrace import LLM, MillraceError, SamplingParams

ASKED = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
PROMPT = {"prompt_token_ids": [1, *range(3, 203)]}


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, 200), ({"prefix_cache": False}, 0), ({"enable_prefix_caching": False}, 0)],
)
def test_it_is_on_unless_turned_off(given: dict[str, Any], found: int) -> None:
    with LLM("tiny", precision="w4a8", evaluate=False, tune=0, **given) as llm:
        (first,), (second,) = llm.generate(PROMPT, ASKED), llm.generate(PROMPT, ASKED)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, found)
        assert first.outputs == second.outputs, "to the last bit of its log probabilities"
        assert llm.reset_prefix_cache() is True
        (third,) = llm.generate(PROMPT, ASKED)
        assert third.num_cached_tokens == 0 and third.outputs == first.outputs


@pytest.mark.parametrize("name", ["prefix_cache", "enable_prefix_caching"])
def test_a_word_is_not_taken_for_yes(name: str) -> None:
    with pytest.raises(MillraceError, match=f"{name} is 'off'"):
        LLM("tiny", **{name: "off"})
