"""Stop strings against the plain way (search the whole text after each character), and the order of reasons."""

import random

import pytest

from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.errors import RequestError
from millrace.runtime.request.request import StopStrings, StopTables
from millrace.runtime.request.sampling_params import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    Delta,
    FinishReason,
    SamplingParams,
)
from tests.runtime.fakes import EOS, LIMITS, make_loop, new_request


def plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings_agree_with_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    letters = rng.choice(["ab", "abc", "aé界"])
    text = "".join(rng.choices(letters, k=rng.randint(0, 40)))
    stops = ["".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(rng.randint(0, 4))]
    include = rng.random() < 0.5
    want, want_stop = plain(text, stops, include)
    matcher, got, stop, at = StopStrings(StopTables(stops), include), "", None, 0
    while at < len(text) and stop is None:
        n = rng.randint(0, 5)
        piece, stop = matcher.push(text[at : at + n])
        got, at = got + piece, at + n
        assert want.startswith(got), "what was given out can be taken back no more"
    got += "" if stop else matcher.flush()
    assert (got, stop) == (want, want_stop)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStrings(StopTables(["</tool>"]), include_in_output=False)
    assert matcher.push("a < b") == ("a < b", None)
    assert matcher.push(" </to") == (" ", None)
    assert matcher.push("p></tool>x") == ("</top>", "</tool>")


def test_a_very_long_stop_string_costs_no_more_per_character() -> None:
    matcher = StopStrings(StopTables(["a" * 100_000]), include_in_output=False)
    for _ in range(100):
        assert matcher.push("a" * 999)[0] == ""
    assert matcher.push("b")[0] == "a" * 99_900 + "b"


def test_the_choices_of_a_request_share_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = StopTables.__init__

    def counting(self: StopTables, stops: list[str]) -> None:
        made.append(len(stops))
        init(self, stops)

    monkeypatch.setattr(StopTables, "__init__", counting)
    make_loop().submit([1], SamplingParams(n=8, stop=["ab", "c"]), lambda deltas: None)
    assert made == [2]


STOPS: list[tuple[object, str]] = [
    (["a" * (MAX_STOP_CHARACTERS + 1)], f"stop[0] has {MAX_STOP_CHARACTERS + 1} characters"),
    (["b", "a" * 3_500_000], "stop[1] has 3500000 characters"),
    (["a" * 1000] * 1000, "stop has 1000 strings"),
    ([""], "stop[0] has 0 characters"),
    (["a", 5], "stop[1] is of type int"),
]


@pytest.mark.parametrize("stop, what", STOPS, ids=[what for _, what in STOPS])
def test_stop_is_bounded_and_its_error_short(stop: list[str], what: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=stop)
    assert caught.value.what == what and caught.value.param == "stop" and len(str(caught.value)) < 300
    SamplingParams(stop=["a" * MAX_STOP_CHARACTERS] * 16)


def test_lists_of_tokens_are_bounded() -> None:
    SamplingParams(stop_token_ids=[1] * MAX_STOP_TOKENS, logit_bias=dict.fromkeys(range(MAX_STOP_TOKENS), 1.0))
    for name, many in (("stop_token_ids", [1] * 1025), ("logit_bias", dict.fromkeys(range(1025), 1.0))):
        with pytest.raises(RequestError, match=f"{name} has 1025 tokens"):
            SamplingParams(**{name: many})  # type: ignore[arg-type]


def answer_to(params: SamplingParams, tokens: list[int]) -> list[Delta]:
    """The deltas of an answer to a one-letter prompt for which these tokens are drawn; all must be taken."""
    (answer,) = new_request([1], params, LIMITS, GenerationDefaults(eos_token_ids=(EOS,))).choices
    deltas = [answer.append_token(token, None) for token in tokens]
    assert all(d.finish_reason is None for d in deltas[:-1])
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(d.text for d in deltas)


A, B, C = 1, 2, 3
E_ACUTE = (11, 12)  # the two bytes of an e with an acute accent


def test_end_of_text_ends_without_its_text() -> None:
    deltas = answer_to(SamplingParams(skip_special_tokens=False), [A, B, EOS])
    assert text_of(deltas) == "ab" and deltas[-1].token_ids == (EOS,)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, None)


def test_ignored_end_of_text_is_a_token_like_others() -> None:
    for skip, text in ((True, "ab"), (False, "a</s>b")):
        params = SamplingParams(ignore_eos=True, max_tokens=3, skip_special_tokens=skip)
        deltas = answer_to(params, [A, EOS, B])
        assert text_of(deltas) == text and deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_is_named(include: bool, text: str) -> None:
    params = SamplingParams(stop_token_ids=[C], include_stop_str_in_output=include)
    deltas = answer_to(params, [A, B, C])
    assert text_of(deltas) == text and deltas[-1].token_ids == (C,)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, C)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "abc")])
def test_a_stop_string_over_two_tokens(include: bool, text: str) -> None:
    params = SamplingParams(stop=["bc"], include_stop_str_in_output=include)
    deltas = answer_to(params, [A, B, C])
    assert [d.text for d in deltas[:2]] == ["a", ""], "b may be the beginning of bc"
    assert text_of(deltas) == text and deltas[-1].stop_reason == "bc"


def test_held_text_is_let_go_at_the_end() -> None:
    deltas = answer_to(SamplingParams(stop=["bcd"], max_tokens=3), [A, B, C])
    assert text_of(deltas) == "abc" and deltas[-1].finish_reason is FinishReason.LENGTH
    deltas = answer_to(SamplingParams(stop=["bcd"]), [A, B, EOS])
    assert text_of(deltas) == "ab" and deltas[-1].finish_reason is FinishReason.STOP


def test_characters_come_whole() -> None:
    deltas = answer_to(SamplingParams(max_tokens=3), [A, *E_ACUTE])
    assert [d.text for d in deltas] == ["a", "", "é"]
    deltas = answer_to(SamplingParams(max_tokens=2), [A, E_ACUTE[0]])
    assert [d.text for d in deltas] == ["a", "\ufffd"]


def test_min_tokens_passes_over_every_stop() -> None:
    params = SamplingParams(min_tokens=4, stop=["b"], stop_token_ids=[C])
    deltas = answer_to(params, [B, C, EOS, EOS])
    assert text_of(deltas) == "bc" and deltas[-1].finish_reason is FinishReason.STOP
    deltas = answer_to(SamplingParams(min_tokens=2, stop=["ab"]), [A, B])
    assert text_of(deltas) == "" and deltas[-1].stop_reason == "ab", "it is complete with token 2"


def test_a_stop_goes_before_the_length() -> None:
    assert answer_to(SamplingParams(max_tokens=2), [A, EOS])[-1].finish_reason is FinishReason.STOP
    assert answer_to(SamplingParams(max_tokens=2, stop=["b"]), [A, B])[-1].finish_reason is FinishReason.STOP
    assert answer_to(SamplingParams(max_tokens=2, stop=["\n"]), [A, B])[-1].finish_reason is FinishReason.LENGTH


def test_an_aborted_answer_gives_what_it_held() -> None:
    loop = make_loop()
    deltas: list[Delta] = []
    loop.cancel(loop.submit([1], SamplingParams(), deltas.extend))
    loop.step()
    assert [(d.finish_reason, d.text) for d in deltas] == [(FinishReason.ABORT, "")]
