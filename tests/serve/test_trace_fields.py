"""What the trace of a request and the timeline say, over HTTP, of a run whose steps and times are known.

The engine's clock moves by a millisecond for each token that is computed, and by nothing else.
"""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx
import pytest

from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.serve.ops import request_trace as trace_module
from tests.runtime.fakes import FakeClock
from tests.serve.support import ROOMY, Fake, Running, post, running, until

# two places, 64 tokens in pages of four, of which one request may have all
TIGHT = replace(ROOMY, max_sequences=2, n_pages=16, max_context=64, max_step_tokens=8)
BLOCK = re.compile(r'<rect class="block k(\d)" x="([\d.]+)" y="(\d+)" [^>]*><title>([^<]*)</title>')
LABEL = re.compile(r'<text x="4" y="(\d+)">([^<]*)</text>')
Trace = dict[str, Any]


class Gate(threading.Event):
    """Steps pass once it is set. reached: one waits at it"""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@contextmanager
def timed(of: ExecutorLimits = ROOMY, prefix_cache: bool = True) -> Iterator[tuple[Running, Gate]]:
    """Its steps begin when the gate is set."""
    clock, go = FakeClock(), Gate()
    go.set()  # for what the server computes before it is ready

    def compute(step: StepInputs) -> None:
        go.reached.set()
        assert go.wait(60)
        clock.now_s += 1e-3 * len(step.tokens)

    with running(Fake(limits=of, clock=clock, before_run=compute, prefix_cache=prefix_cache)) as server:
        go.clear()
        go.reached.clear()
        try:
            yield server, go
        finally:
            go.set()


def ask(server: Running, name: str, prompt: list[int], n_tokens: int, **more: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True, "seed": 1, **more}
    reply = post(server.url, "/v1/completions", body, **{"x-request-id": name})
    assert reply.status_code == 200, reply.text
    return reply


def ask_all(server: Running, go: Gate, asked: dict[str, dict[str, Any]]) -> dict[str, Trace]:
    """One after the other, all before the first step ends. By their names"""
    with ThreadPoolExecutor(len(asked)) as pool:
        replies, n_there = [], 0

        def all_are_there() -> bool:
            stats = server.stats()
            return stats.running + stats.waiting == n_there

        for name, what in asked.items():
            replies.append(pool.submit(ask, server, name, **what))
            n_there += what.get("n", 1)
            until(all_are_there)
            assert go.reached.wait(60), "the first step is that of the first alone"
        go.set()
        for reply in replies:
            reply.result(20)
    return {name: trace(server, name) for name in asked}


def trace(server: Running, name: str) -> Trace:
    (found,) = httpx.get(f"{server.url}/v1/requests/{name}/trace").json()["data"]
    assert found["id"] == name
    steps: Trace = found
    return steps


@dataclass(frozen=True)
class Block:
    kind: int
    x: float
    title: str


def timeline(server: Running) -> dict[str, list[Block]]:
    """The blocks of each row, by its label."""
    page = httpx.get(server.url + "/timeline").text
    rows = {int(y) - 11: label for y, label in LABEL.findall(page)}
    found: dict[str, list[Block]] = {label: [] for label in rows.values()}
    for kind, x, y, title in BLOCK.findall(page):
        found[rows[int(y) - 1]].append(Block(int(kind), float(x), title))
    return found


def test_a_trace_of_a_run_that_is_short_of_pages_adds_up() -> None:
    """48 tokens each, of 64 that there are: the second gives way to the first, and the third has no place."""
    names = {"first": [5], "second": [6], "third": [7]}
    with timed(TIGHT) as (server, go):
        before = server.stats()
        found = ask_all(server, go, {name: {"prompt": first * 8, "n_tokens": 40} for name, first in names.items()})
        stats = server.wait_until_idle()
        preempted = {name: one["preemptions"] for name, one in found.items()}
        assert preempted["first"] == 0 < preempted["second"] and sum(preempted.values()) == stats.preemptions_total
        steps = {name: {step["step"]: step for step in one["steps"]} for name, one in found.items()}
        all_steps: dict[int, dict[str, Any]] = {}
        for name, one in found.items():
            assert one["generated_tokens"] == sum(step["drawn_tokens"] for step in one["steps"]) == 40
            assert one["prompt_tokens"] == 8 and one["cached_tokens"] == 0 == one["prefill_saved_ms"]
            for number, step in steps[name].items():
                present = [other for other in names if number in steps[other]]
                assert step["others"] == len(present) - 1
                absent = [other for other in names if other not in present and max(steps[other]) > number]
                is_first = number == before.steps_total + 1  # the others came while it ran
                assert step["waiting"] == (0 if is_first else len(absent))
                assert step["took_ms"] == step["all_tokens"], "a millisecond for each token"
                all_steps[number] = step
        assert sorted(all_steps) == list(range(before.steps_total + 1, stats.steps_total + 1))
        begins_ms = 0
        for _, step in sorted(all_steps.items()):  # all were queued before the clock moved
            assert step["at_ms"] == begins_ms
            begins_ms += step["took_ms"]
        assert begins_ms == stats.step_tokens_total - before.step_tokens_total
        assert begins_ms == max(one["total_ms"] for one in found.values())
        assert found["first"]["queued_ms"] == 0 and found["first"]["first_token_ms"] == 8
        assert sum(step["prompt_tokens"] for step in steps["first"].values()) == 8
        assert found["third"]["queued_ms"] == found["third"]["steps"][0]["at_ms"] > 40


@pytest.mark.parametrize("prefix_cache, n", [(True, 8), (False, 6)])
def test_the_timeline_tells_prompts_tokens_and_output_computed_again(prefix_cache: bool, n: int) -> None:
    """Without the prefix cache all of it is, and the first chunk of eight tokens has two of the answer in it.

    n: tokens of each prompt
    """
    with timed(TIGHT, prefix_cache) as (server, go):
        asked = {name: {"prompt": [first] * n, "n_tokens": 40} for name, first in (("first", 5), ("second", 6))}
        found = ask_all(server, go, asked)
        rows = timeline(server)
    del rows["warm-up 0"]
    assert set(rows) == {"first 0", "second 0"}
    first_steps = {step["step"] for one in found.values() for step in one["steps"] if step["prompt_tokens"]}

    def begins(step: dict[str, Any]) -> bool:
        """The other one's prompt is in it, and is no token that it draws: this one draws one."""
        return step["step"] in first_steps

    for name, one in found.items():
        blocks = rows[f"{name} 0"]
        assert len(blocks) == len(one["steps"]) and [b.x for b in blocks] == sorted(b.x for b in blocks)
        for block, step in zip(blocks, one["steps"], strict=True):
            n_prompt, n_drawn = step["prompt_tokens"], step["drawn_tokens"]
            n_again = 1 if begins(step) else step["all_tokens"] - step["others"]
            what = (
                f"{n_prompt} prompt tokens"
                if n_prompt
                else "a token"
                if n_drawn and n_again == 1
                else f"{n_again} tokens again"
            )
            after = f", {step['took_ms']:.1f} ms, {step['others'] + 1} sequences"
            assert block.title == f"step {step['step']}: {what}{after}"
            assert block.kind == (1 if n_prompt else 0)
    titles = [b.title.partition(": ")[2] for b in rows["first 0"]]
    assert titles[:2] == [f"{n} prompt tokens, {n}.0 ms, 1 sequences", f"a token, {min(8, n + 1)}.0 ms, 2 sequences"]
    assert [b.kind for b in rows["first 0"]] == [1] + [0] * 39
    computed = [step["prompt_tokens"] for step in found["second"]["steps"]]
    assert found["second"]["preemptions"] == 1 and sum(computed) == (n if prefix_cache else 2 * n)
    rest = [step for step in found["second"]["steps"] if not step["prompt_tokens"]]
    again = [
        step
        for step in rest
        if not step["drawn_tokens"] or (not begins(step) and step["all_tokens"] - step["others"] > 1)
    ]
    assert again and sum("tokens again" in b.title for b in rows["second 0"]) == len(again)


def test_others_are_those_of_other_requests() -> None:
    """Not one's own choices: of three sequences in a step, a request with two of them has one beside it."""
    with timed() as (server, go):
        found = ask_all(server, go, {"one": {"prompt": [5], "n_tokens": 20},
                                     "two": {"prompt": [6], "n_tokens": 8, "n": 2}})  # fmt: skip
        rows = timeline(server)
    assert set(rows) == {"warm-up 0", "one 0", "two 0", "two 1"}
    beside = [step for step in found["two"]["steps"] if step["drawn_tokens"] == 2]
    assert len(beside) >= 6 and all((step["others"], step["all_tokens"]) == (1, 3) for step in beside)
    at = {step["step"] for step in beside}
    assert {step["others"] for step in found["one"]["steps"] if step["step"] in at} == {2}
    assert found["one"]["steps"][-1]["others"] == 0 and found["one"]["steps"][-1]["waiting"] == 0


def test_what_a_known_prompt_saved_is_what_it_took_before() -> None:
    prompt = [5, 6, 7, 8] * 10 + [9, 9]
    with timed() as (server, go):
        go.set()
        for name in ("miss", "hit"):
            ask(server, name, prompt, 2)
        miss, hit = trace(server, "miss"), trace(server, "hit")
    assert (miss["cached_tokens"], hit["cached_tokens"]) == (0, 41)
    assert (miss["first_token_ms"], miss["prefill_saved_ms"]) == (42, 0)
    assert (hit["first_token_ms"], hit["prefill_saved_ms"]) == (1, 41)
    assert sum(step["prompt_tokens"] for step in hit["steps"]) == 1
    assert [step["all_tokens"] for step in hit["steps"]] == [1, 1] and hit["total_ms"] == 2


def test_the_pace_of_prompts_is_found_once_for_all_traces_of_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, pace = list[int](), trace_module._prompt_token_s
    with timed() as (server, go):
        go.set()
        for i in range(3):
            ask(server, "same", [5, 6, i], 1)

        def counted(steps: Any) -> float | None:
            asked.append(len(steps))
            return pace(steps)

        monkeypatch.setattr(trace_module, "_prompt_token_s", counted)
        told = httpx.get(f"{server.url}/v1/requests/same/trace").json()["data"]
        assert httpx.get(f"{server.url}/v1/requests/nobody/trace").status_code == 404
    assert [one["prompt_tokens"] for one in told] == [3, 3, 3] and len(asked) == 1 and asked[0] >= 3


def test_the_steps_as_data_are_those_of_the_run() -> None:
    """A millisecond a token: each step took what it had tokens, and all tokens of all requests are in them once."""
    with timed(TIGHT) as (server, go):
        before = httpx.get(server.url + "/timeline.json").json()["data"][0]["steps"][-1]["step"]
        asked = {name: {"prompt": [first] * 10, "n_tokens": 12} for name, first in (("first", 5), ("second", 6))}
        ask_all(server, go, asked)
        (told,) = httpx.get(server.url + f"/timeline.json?after={before}").json()["data"]
        schedule = told["schedule"]
        refused = [httpx.get(server.url + f"/timeline.json?{q}").status_code for q in ("after=-1", "last=3", "after=")]
    assert refused == [400, 400, 400]
    assert (schedule["max_sequences"], schedule["max_step_tokens"], schedule["pages"]) == (2, 8, 16)
    assert (schedule["gap_limit_s"], schedule["stretch"], schedule["chunk_low"]) == (0.1, 1.9, 8)
    steps = told["steps"]
    assert [s["step"] for s in steps] == list(range(before + 1, before + 1 + len(steps)))
    for s in steps:
        assert s["took_s"] == pytest.approx(1e-3 * (s["rows"] + sum(n for _, n in s["prompts"])))
    assert sum(n for s in steps for _, n in s["prompts"]) == 20 and sum(s["rows"] for s in steps) == 2 * 11
    for s, after in pairwise(steps):  # nothing moves the clock but steps
        assert s["turn_s"] == pytest.approx(after["at_s"] - s["at_s"]) == pytest.approx(s["took_s"])
    assert steps[-1]["turn_s"] is None and steps[-1]["contexts"] == 10 + 11
