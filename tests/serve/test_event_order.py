"""What streams of /v1/responses and /v1/messages send, event by event: clients are told each part's begin and end."""

import json
from itertools import groupby
from typing import Any

import pytest

from tests.serve.support import post
from tests.serve.thinkers import CALL, MESSAGES, RESPONSES, TEXT, THOUGHT, Thinker, body

Event = dict[str, Any]
GIVEN = ('{"a": 5}', '{"a": 7}')  # to two calls
TWO_CALLS = f"{CALL}\n{CALL.replace(GIVEN[0], GIVEN[1])}"


def sent(thinker: Thinker, path: str, asked: Event) -> list[Event]:
    """As the specification of server-sent events has it: a name and one line of data each, and nothing between."""
    response = post(thinker.served.url, path, {**asked, "stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def kinds(events: list[Event]) -> list[str]:
    """What follows each other is of one kind only for deltas."""
    found = []
    for kind, same in groupby(event["type"] for event in events):
        assert len(list(same)) == 1 or kind.endswith("delta"), f"{kind} more than once"
        found.append(kind.removeprefix("response."))
    return found


def n_said(thinker: Thinker) -> int:
    """Tokens, its end's included."""
    return len(thinker.executor.words.encode(thinker.executor.says, False)) + 1


@pytest.mark.parametrize("before", ["", f"{TEXT}\n"])
def test_calls_of_a_response(thinker: Thinker, before: str) -> None:
    thinker.says(before + TWO_CALLS)
    events = sent(thinker, RESPONSES, body(RESPONSES, tools=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    i = next(i for i, e in enumerate(events) if e.get("item", {}).get("type") == "function_call")
    calls, last = events[i:-1], events[-1]
    a_call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(calls) == a_call * 2
    assert last["type"] == "response.completed" and last["response"]["status"] == "completed"
    assert {event["output_index"] for event in events[2:i]} == set(range(2 if before else 1))
    n_before = len(last["response"]["output"]) - 2
    assert n_before == (2 if before else 1)
    for n, given in enumerate(GIVEN):
        mine = [event for event in calls if event["output_index"] == n_before + n]
        added, *deltas, done, item_done = mine
        assert kinds(mine) == a_call
        assert "".join(delta["delta"] for delta in deltas) == given
        assert done["arguments"] == given and done["name"] == "add"
        item = item_done["item"]
        assert item == last["response"]["output"][n_before + n]
        assert (item["type"], item["name"], item["arguments"], item["status"]) == (
            "function_call", "add", given, "completed",
        )  # fmt: skip
        assert added["item"] == {**item, "arguments": "", "status": "in_progress"}
        assert {event["item_id"] for event in (*deltas, done)} == {item["id"]} and item["call_id"]
    first, second = last["response"]["output"][-2:]
    assert first["id"] != second["id"] and first["call_id"] != second["call_id"]


@pytest.mark.parametrize("cut", ["thought", "text", "call"])
def test_an_item_that_is_cut_off_ends_as_the_response_has_it(thinker: Thinker, cut: str) -> None:
    thinker.says(CALL if cut == "call" else TEXT)
    words, said = thinker.executor.words, thinker.executor.says
    until = {"thought": "or", "text": "It is", "call": '{"a": '}[cut]
    n = len(words.encode(said[: said.rindex(until) + len(until)], False))
    events = sent(thinker, RESPONSES, body(RESPONSES, tools=True, n=n))
    assert events[-1]["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["status"] for item in done] == ["completed"] * (len(done) - 1) + ["incomplete"]
    assert done[-1]["type"] == {"thought": "reasoning", "text": "message", "call": "function_call"}[cut]


@pytest.mark.parametrize("text", ["", TEXT])
def test_blocks_of_a_message(thinker: Thinker, text: str) -> None:
    thinker.says(f"{text}\n{TWO_CALLS}" if text else TWO_CALLS)
    events = [e for e in sent(thinker, MESSAGES, body(MESSAGES, tools=True)) if e["type"] != "ping"]
    a_block = ["content_block_start", "content_block_delta", "content_block_stop"]
    expected: list[tuple[Event, str, str]] = [
        ({"type": "thinking", "thinking": "", "signature": ""}, "thinking", THOUGHT),
        *([({"type": "text", "text": ""}, "text", text)] if text else []),
        *(({"type": "tool_use", "name": "add", "input": {}}, "partial_json", given) for given in GIVEN),
    ]
    assert kinds(events) == ["message_start", *a_block * len(expected), "message_delta", "message_stop"]
    own_types = {"thinking": "thinking_delta", "text": "text_delta", "partial_json": "input_json_delta"}
    ids = []
    for n, (begun, part, whole) in enumerate(expected):
        start, *deltas, stop = (event for event in events if event.get("index") == n)
        assert kinds([start, *deltas, stop]) == a_block and stop == {"type": "content_block_stop", "index": n}
        ids.append(start["content_block"].pop("id", None))
        assert start["content_block"] == begun
        assert all(set(event["delta"]) == {"type", part} for event in deltas)
        assert {event["delta"]["type"] for event in deltas} == {own_types[part]}
        assert "".join(event["delta"][part] for event in deltas) == whole
    assert ids[:-2] == [None] * (len(ids) - 2) and ids[-2] and ids[-1] and ids[-2] != ids[-1]
    message, (delta, stop) = events[0]["message"], events[-2:]
    assert (message["role"], message["content"], message["stop_reason"]) == ("assistant", [], None)
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == n_said(thinker) and stop == {"type": "message_stop"}
    asked = body(MESSAGES, tools=True)
    del asked["max_tokens"]
    n_prompt = post(thinker.served.url, f"{MESSAGES}/count_tokens", asked).json()["input_tokens"]
    for usage in (message["usage"], delta["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt


@pytest.mark.parametrize("end", ["end_turn", "max_tokens", "stop_sequence"])
def test_a_message_tells_why_it_ended(thinker: Thinker, end: str) -> None:
    """After its last block was closed."""
    thinker.says(TEXT)
    n = 30 if end == "max_tokens" else 400
    asked = {**body(MESSAGES, n=n), **({"stop_sequences": ["five"]} if end == "stop_sequence" else {})}
    closed, delta, stop = sent(thinker, MESSAGES, asked)[-3:]
    assert closed == {"type": "content_block_stop", "index": 0 if end == "max_tokens" else 1}
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    assert delta["delta"] == {"stop_reason": end, "stop_sequence": "five" if end == "stop_sequence" else None}
    if end != "stop_sequence":
        assert delta["usage"]["output_tokens"] == (n if end == "max_tokens" else n_said(thinker))
