"""Answers that contradict each other are refused for that, whatever else is wrong, and before anything is computed."""

from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size import plan
from millrace.size.answer.answer import answer_question
from millrace.size.question.question import SizingQuestion

# A model and a limit that nothing keeps: what is said of these would come later.
ASKED = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "rate": 4.0, "ttft_ms": 1.0}


@pytest.mark.parametrize("more, said", [
    ({"users": 10.0}, r"a peak of 4 requests/s, and 10 users with 3 requests a day are 0.0003472[^|]*10,000 times"),
    ({"tp": 3}, r"--tp 3[^|]*1, 2, 4, 8: heads are cut into equal parts"),
    ({"tp": 2, "hardware": ["this"]}, "--tp with --hardware this"),
    ({"system_size": 4, "hardware": ["this"]}, "--system-size with --hardware this"),
    ({"precision": ["fp7"]}, "--precision fp7"), ({"window_s": 5.0}, "window_s beside a peak that is said"),
    ({"percentile": 99.0, "average": 3.0}, "the peak is said, and what would make one"),
    ({"preset": "rag"}, "--preset rag beside isl and osl"),
    ({"words_a_token": 0.5}, "--words-a-token, and no length is in words"),
    ({"ttft_ms": 900.0, "e2e_ms": 800.0}, "900 ms for the first token, and 800 for the last"),
    ({"arrivals": "gamma", "simulate": False}, "--arrivals gamma with --no-simulate"),
    ({"search_s": 9.0, "simulate": False}, "--search-s with --no-simulate"),
    ({"routing": "least-loaded", "measured": "none.csv"}, "--routing least-loaded with --measured"),
    ({"routing": "least-loaded", "arrivals": "closed"}, "--routing least-loaded with --arrivals closed"),
    ({"of": "p95", "simulate": False}, "limits are on the p95, which a closed form does not know"),
])  # fmt: skip
def test_what_contradicts_is_refused_first(more: dict[str, Any], said: str) -> None:
    def here() -> Any:
        raise AssertionError("this machine is measured only where it is asked for")

    with pytest.raises(ConfigError, match=said):
        answer_question(SizingQuestion.from_answers({**ASKED, **more}), local_roofline=here)


@pytest.mark.parametrize("more", [
    {"users": 1e5, "rate": 4.0, "isl": 2000, "osl": 200}, {"preset": "rag", "osl": 100, "rate": 1.0},
    {"preset": "rag", "input": "600 words", "words_a_token": 0.6, "rate": 1.0},
])  # fmt: skip
def test_what_completes_each_other_is_not(more: dict[str, Any]) -> None:
    assert plan(model="llama-3-8b", ttft_ms=900, simulate=False, **more).plan.systems == 1


def test_a_device_that_was_named_and_does_not_do_is_told() -> None:
    asked = {**ASKED, "ttft_ms": 900, "simulate": False}
    found = plan(**asked, hardware=["A100", "H100", "L4"], precision=["fp8"], tp=1).alternatives
    refused = {one.device: one.why_not.what for one in found if one.plan is None and one.why_not}
    assert found[0].plan is not None and refused == {"A100 SXM 80GB": "A100 SXM 80GB (Ampere) does not multiply fp8"}
    assert all(one.plan for one in plan(**asked, hardware=["all"], precision=["fp8"]).alternatives)


@pytest.mark.parametrize("name, said", [
    ("1 x H200", '--hardware "H200 SXM" --system-size 1'), ("2xL40S", '--hardware "L40S" --system-size 2'),
    ("L40S,H100", '--hardware "L40S" --hardware "H100"'), ("2 cores", "--hardware this, on that machine"),
    ("cpu", "--hardware this"), ("EPYC 9654", "has what memory is put into its machine"), ("H10O", "h100"),
])  # fmt: skip
def test_what_people_write_for_hardware(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        plan(**{**ASKED, "hardware": [name]})
    assert said in str(found.value)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct-hf", "Llama-3.1-8b-it"])
def test_names_of_the_hub_are_told_theirs(name: str) -> None:
    with pytest.raises(ConfigError, match=r'did you mean "llama-3\.1-8b"'):
        plan(**{**ASKED, "model": name})


@pytest.mark.parametrize("asked, missing", [
    ({"rate": 5.0}, ["which model", "how long a prompt", "how long an answer", "what users may wait for"]),
    ({"model": "llama-3-8b"}, ["how long a prompt", "how long an answer", "how many requests", "what users may wait"]),
    ({"measured": "r.csv", "preset": "rag"}, ["how many requests", "what users may wait for"]),
    ({"trace": "t.jsonl"}, ["which model", "what users may wait for"]),
    ({"systems": "1", "question": "9 words", "mode": "offline"}, ["which model", "how long an answer"]),
])  # fmt: skip
def test_all_that_lacks_is_said_at_once(asked: dict[str, Any], missing: list[str]) -> None:
    with pytest.raises(ConfigError) as said:
        answer_question(SizingQuestion.from_answers(asked))
    parts = said.value.what.removeprefix("not said: ").split("; ")
    assert len(parts) == len(missing) and all(map(str.startswith, parts, missing)), parts


def test_one_that_lacks_is_said_by_what_reads_it() -> None:
    asked = {name: value for name, value in ASKED.items() if name != "rate"}
    with pytest.raises(ConfigError, match=r"how many requests come is not said"):
        answer_question(SizingQuestion.from_answers(asked))
