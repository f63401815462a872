"""Lengths in tokens: words are no tokens, what is built of parts, calls in a row, contradictions."""

from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size.load.token_lengths import ModelCall, parse_length, request_work
from millrace.size.performance.models import PRESETS
from millrace.size.question.settings import RequestSettings


def made(**asked: Any) -> tuple[float, float]:
    return request_work(RequestSettings(**asked)).answer.lengths


def test_seed_a_needs_one_token_a_word_and_says_what_words_make() -> None:
    """The published case takes 3,500 words for 3,500 tokens; at 0.75 words a token they are 4,667 and 667."""
    assert made(isl=3500, osl=500) == (3500, 500)
    in_words = request_work(RequestSettings(input="3,500 words", output="500 words"))
    assert in_words.answer.lengths == pytest.approx((4667, 667), abs=0.5)
    assert "3,500 words are 4,667 tokens, at 0.75 words a token" in in_words.how[0]
    assert made(input="3500 words", output="500 words", words_a_token=1) == (3500, 500)


@pytest.mark.parametrize("text, n", [
    ("900 tokens", 900), ("1 token", 1), ("5 x 300 words", 2000), ("4000 characters", 1000), ("4_000 chars", 1000),
    ("1.5 words", 2),
])  # fmt: skip
def test_units(text: str, n: float) -> None:
    assert parse_length(text, "input", 0.75)[0] == pytest.approx(n)


@pytest.mark.parametrize("text, said", [
    ("3500", "of what"), ("3500 pages", 'in "pages"'), ("words", "a number with its unit"), ("0.1 words", "1 to"),
    ("1e9 words", "a number with its unit"), ("99999999999 words", "1 to"), ("3500 wrds", 'did you mean "words"'),
])  # fmt: skip
def test_a_length_without_a_unit_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_length(text, "input", 0.75)
    assert said in str(found.value)


def test_a_prompt_of_parts() -> None:
    asked = RequestSettings(
        system="300 tokens", documents="5 x 400 words", history="300 words", question="30 words", osl=500
    )
    assert request_work(asked).answer.lengths == pytest.approx((300 + 2000 / 0.75 + 400 + 40, 500))
    assert request_work(asked).how[-2] == "input: 3,407 tokens together"


def test_presets() -> None:
    assert made(preset="rag") == (3500, 500) and made(preset="rag", osl=100) == (3500, 100)
    assert request_work(RequestSettings(), (12.5, 3.5)).answer.lengths == (12.5, 3.5), "means of a trace"


def test_a_pipeline() -> None:
    """Calls before the last have usual lengths where known, and their own where said."""
    found = request_work(RequestSettings(isl=3500, osl=500, pipeline="guard>rag>answer", question="30 words"))
    assert [call.lengths for call in found.calls] == [(40, 10), (40, 50), (3500, 500)]
    assert "assumed: it reads the question" in found.how[-1] and found.n_input == 3580 and found.n_output == 560
    said = request_work(RequestSettings(isl=3500, osl=500, pipeline="check:200/5 > guard > tell:100/20"))
    assert said.calls == (
        ModelCall("check", 200, 5, "as said"), ModelCall("guard", 3500, 10, "assumed: it reads the whole prompt"),
        ModelCall("tell", 100, 20),
    )  # fmt: skip
    for known in ({"preset": "rag"}, {"isl": 3500, "osl": 500}):  # the question is no whole prompt then
        short = request_work(RequestSettings(**known, pipeline="guard>answer", question="30 words"))
        assert [call.lengths for call in short.calls] == [(40, 10), (3500, 500)]
        assert "question: 30 words are 40 tokens, at 0.75 words a token" in short.how
    of_trace = request_work(RequestSettings(pipeline="guard>answer", question="30 words"), (900.0, 80.0))
    assert [call.lengths for call in of_trace.calls] == [(40, 10), (900, 80)]
    alone = request_work(RequestSettings(pipeline="guard>answer", question="30 words", osl=80))
    assert [call.lengths for call in alone.calls] == [(40, 10), (40, 80)]


def test_the_context_is_held() -> None:
    model = PRESETS["llama-2-7b"]
    request_work(RequestSettings(isl=model.max_context - 96, osl=96)).check(model)
    with pytest.raises(ConfigError, match=r"request: 4,001 tokens in and 96 out are 4,097\n.*4,096"):
        request_work(RequestSettings(isl=model.max_context - 95, osl=96)).check(model)


@pytest.mark.parametrize("asked, said", [
    ({}, "length of the input is not said"), ({"isl": 5}, "length of the output is not said"),
    ({"isl": 5, "input": "5 words", "osl": 5}, "said twice: by isl and input"),
    ({"isl": 5, "system": "5 words", "osl": 5}, "said twice: by isl and system"),
    ({"isl": 5, "system": "5 words", "osl": 5, "pipeline": "guard>a"}, "said twice"),
    ({"isl": 5, "osl": 5, "pipeline": "sort>answer"}, 'lengths of "sort"'),
    ({"isl": 5, "osl": 5, "pipeline": "guard>"}, 'a call ""'),
    ({"isl": 5, "osl": 5, "pipeline": "guard:0/5>a"}, 'a call "guard:0/5"'),
    ({"isl": 5, "osl": 5, "pipeline": ">".join("abcdefghijklmnopq")}, "a pipeline of 17 calls"),
])  # fmt: skip
def test_contradictions_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        request_work(RequestSettings(**asked))
    assert said in str(found.value)
