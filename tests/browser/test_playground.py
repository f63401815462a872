"""The page `/` in Chromium, against `millrace serve tiny`, used as people use it: mostly by the keyboard."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.browser.conftest import DESKTOP, KEY, PHONE, Open, Seen
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response, Route

pytest.importorskip("playwright", reason="playwright is not installed")

CHAT = "/v1/chat/completions"
EVIL = '<img src=x onerror="window.hacked=1">\u202egnp.exe\u2066'
LONG = 1800  # tokens


def focused(page: "Page") -> str:
    return str(page.evaluate("document.activeElement.id"))


def set_fields(page: "Page", **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)


def ask(seen: Seen, words: str) -> "Response":
    """By the keyboard, as soon as the page has the focus there; the reply has begun, and is not at its end."""
    assert focused(seen.page) == "words"
    seen.page.keyboard.type(words)
    with seen.page.expect_response(f"**{CHAT}") as reply:
        seen.page.keyboard.press("Enter")
    return reply.value


def answered(seen: Seen, n: int = 1) -> str:
    """The text of the last of n answers, when all are complete: each with its trace."""
    page = seen.page
    page.locator(".said .trace").nth(n - 1).wait_for(state="attached")
    return str(page.locator(".said .text").last.evaluate("e => e.textContent"))


def trace_of(seen: Seen, reply: "Response", key: str = "") -> dict[str, Any]:
    """As the server tells it."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    path = f"{seen.url}/v1/requests/{reply.headers['x-request-id']}/trace"
    found: dict[str, Any] = httpx.get(path, headers=headers).json()["data"][0]
    return found


def hit_rate(url: str) -> int:
    """Per cent of the tokens of prompts that the server's cache knew."""
    families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
    of = {sample.name: sample.value for family in families for sample in family.samples}
    return round(100 * of["vllm:prefix_cache_hits_total"] / of["vllm:prefix_cache_queries_total"])


@contextmanager
def load(url: str, n: int) -> Iterator[None]:
    """Others that are answered meanwhile."""
    body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1900, "ignore_eos": True}
    with ThreadPoolExecutor(n) as threads:
        asked = [threads.submit(httpx.post, url + CHAT, json=body, timeout=120) for _ in range(n)]
        yield
        assert all(one.result().status_code == 200 for one in asked)


def streamed(*deltas: str, logprobs: bool = False) -> str:
    """A stream of events with this text, as the server would send it."""
    events: list[dict[str, Any]] = []
    for delta in deltas:
        one = {"token": delta, "logprob": -0.1, "bytes": None}
        told = (
            {"content": [{**one, "top_logprobs": [one, {**one, "token": EVIL, "logprob": -3}]}]} if logprobs else None
        )
        events.append({"choices": [{"index": 0, "delta": {"content": delta}, "logprobs": told}]})
    usage = {"completion_tokens": 1, "prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    events += [{"choices": [], "usage": usage, "millrace": {"seed": 1}}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_a_page_that_needs_nobody_else(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    seen.wait("#load", "running")
    assert {r.url.removeprefix(tiny) for r in seen.requests} == {"/", "/v1/models", "/metrics"}
    assert seen.page.locator("#model option").all_text_contents() == ["tiny"]
    assert seen.page.evaluate("fetch('https://example.invalid/').then(() => 'asked', () => 'refused')") == "refused"
    seen.forgive("Content Security Policy")
    seen.requests = [r for r in seen.requests if "example.invalid" not in r.url]


def test_a_chat_by_keyboard_alone(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    page = seen.page
    page.evaluate(
        """() => { window.lengths = []; new MutationObserver(() => {
          const texts = document.querySelectorAll(".said .text"), last = texts[texts.length - 1];
          if (texts.length > 1) window.lengths.push(last.textContent.length);
        }).observe(document.getElementById("talk"), { childList: true, subtree: true, characterData: true }); }"""
    )
    ask(seen, "Tell me a story about a fox.")
    text = answered(seen)
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) > 5 and lengths == sorted(lengths), "the text comes bit by bit"
    (body,) = seen.bodies
    assert body["messages"] == [{"role": "user", "content": "Tell me a story about a fox."}] and body["stream"]
    assert focused(page) == "words" and page.locator("#words").input_value() == ""
    page.keyboard.type("And")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("then?")
    assert page.locator("#words").input_value() == "And\nthen?"
    page.keyboard.press("Enter")
    answered(seen, 2)
    assert [m["content"] for m in seen.bodies[1]["messages"]] == [body["messages"][0]["content"], text, "And\nthen?"]
    stops = {"words"}
    for _ in range(40):
        page.keyboard.press("Tab")
        stops.add(focused(page))
    named = {
        "send",
        "model",
        "system",
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "logprobs",
        "key",
        "clear",
        "talk",
    }
    assert named | {"timeline"} <= stops, "Tab comes everywhere"


def endless(route: "Route") -> None:
    """The same request, whose answer does not end by itself."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


@pytest.mark.parametrize("how", ["Tab to Stop, Enter", "Escape"])
def test_stop_ends_an_answer(tiny: str, open_page: Open, how: str) -> None:
    seen = open_page(tiny)
    page, text = seen.page, ".said:nth-child(2) .text"
    set_fields(page, max_tokens=str(LONG))
    page.route(f"**{CHAT}", endless)
    page.locator("#words").focus()
    with load(tiny, 8):
        reply = ask(seen, "Go on and on.")
        seen.wait(text, "(?s).{20}")
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.keyboard.press("Tab")
            assert focused(page) == "stop"
            page.keyboard.press("Enter")
        page.get_by_text("stopped", exact=True).wait_for()
        assert page.locator("#stop").is_hidden() and focused(page) == "words"
        stopped_at = page.locator(text).text_content()
    assert page.locator(text).text_content() == stopped_at, "also when all others are done"
    assert 0 < trace_of(seen, reply)["generated_tokens"] < LONG, "the server has heard of it"


def test_parameters_reach_the_request_and_its_answer(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    fields = {"temperature": "0.7", "top_p": "0.9", "max_tokens": "17", "seed": "7", "system": "You tell stories."}
    set_fields(seen.page, **fields)
    seen.page.locator("#words").focus()
    ask(seen, "Tell me of a mill.")
    text = answered(seen)
    expected = {
        "model": "tiny", "temperature": 0.7, "top_p": 0.9, "max_tokens": 17, "seed": 7, "stream": True,
        "stream_options": {"include_usage": True}, "messages": [
            {"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Tell me of a mill."},
        ],
    }  # fmt: skip
    assert seen.bodies == [expected]
    alone = {name: value for name, value in expected.items() if not name.startswith("stream")}
    assert httpx.post(tiny + CHAT, json=alone, timeout=60).json()["choices"][0]["message"]["content"] == text != ""
    assert "seed 7" in seen.page.locator(".foot").inner_text()


def test_tokens_tell_their_probabilities(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    page = seen.page
    page.get_by_role("checkbox", name="log probabilities").check()
    set_fields(page, seed="3", max_tokens="12", temperature="1")
    page.locator("#words").focus()
    ask(seen, "Tell me of a mill.")
    answered(seen)
    told = httpx.post(tiny + CHAT, json={**seen.bodies[0], "stream": False, "stream_options": None}, timeout=60).json()
    expected = told["choices"][0]["logprobs"]["content"]
    tokens = page.locator(".token")
    assert tokens.all_text_contents() == [one["token"] for one in expected] and len(expected) > 3

    def shown() -> list[list[str]]:
        rows = page.get_by_role("region", name="log probabilities").locator("tr").all()
        return [row.locator("td").all_text_contents() for row in rows[1:]]

    def rows_of(one: dict[str, Any]) -> list[tuple[str, float]]:
        others = [o for o in one["top_logprobs"] if o["token"] != one["token"]]
        return [(json.dumps(o["token"], ensure_ascii=False), o["logprob"]) for o in (one, *others)]

    tokens.nth(1).click()
    for at, key in ((1, "ArrowRight"), (2, "ArrowRight"), (3, "Home"), (0, "End"), (len(expected) - 1, "")):
        assert [row[1] for row in shown()] == [token for token, _ in rows_of(expected[at])]
        assert [float(row[2]) for row in shown()] == pytest.approx([p for _, p in rows_of(expected[at])], abs=6e-4)
        assert tokens.nth(at).get_attribute("aria-pressed") == "true"
        if key:
            page.keyboard.press(key)
    assert sum(tokens.nth(i).get_attribute("tabindex") == "0" for i in range(len(expected))) == 1, "one stop of Tab"


def test_the_trace_is_the_servers(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    reply = ask(seen, "Tell me of a mill, a miller and a stream.")
    answered(seen)
    trace = trace_of(seen, reply)
    summary = seen.page.locator(".trace summary")
    assert f"first token {trace['first_token_ms']:.1f} ms, {len(trace['steps'])} steps" in summary.inner_text()
    summary.focus()
    seen.page.keyboard.press("Enter")
    told = seen.page.locator(".trace").inner_text()
    assert f"{trace['prompt_tokens']} prompt tokens" in told and f"{trace['generated_tokens']} drawn" in told
    rows = seen.page.get_by_role("region", name="steps").locator("tr").all()[1:]
    cells = [[float(cell) for cell in row.locator("td").all_text_contents()] for row in rows]
    names = ("step", "at_ms", "took_ms", "prompt_tokens", "drawn_tokens", "others")
    expected = [[step[name] for name in names] for step in trace["steps"]]
    assert len(cells) == len(expected) > 1
    for row, of_step in zip(cells, expected, strict=True):
        assert row == pytest.approx(of_step, abs=0.051)


def test_load_and_cache_are_live(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    with load(tiny, 12):
        told = seen.wait("#load", "^[1-9]")
        busy = re.fullmatch(r"(\d+) running, (\d+) waiting \| KV ([\d.]+) %.*", told)
        assert busy and 1 <= int(busy[1]) <= 12 and 0 < float(busy[3]) <= 100
    seen.wait("#load", "^0 running, 0 waiting")
    rates = []
    for _ in range(2):  # the second begins as the first: what is alike comes from the cache
        seen.page.get_by_role("button", name="New conversation").click()
        set_fields(seen.page, words="Tell me of a mill. " * 150)
        seen.page.keyboard.press("Enter")
        answered(seen)
        rates.append(hit_rate(tiny))
        seen.wait("#load", rf"^0 running, 0 waiting .* prefix cache {rates[-1]} %$")
    assert rates[0] < rates[1] and [len(body["messages"]) for body in seen.bodies] == [1, 1]


@pytest.mark.parametrize("logprobs", [False, True])
def test_hostile_text_is_text(tiny: str, open_page: Open, logprobs: bool) -> None:
    seen = open_page(tiny)
    page = seen.page

    def reply(route: "Route") -> None:
        route.fulfill(body=streamed(EVIL, "</div><script>window.hacked=1</script>", logprobs=logprobs))

    page.route(f"**{CHAT}", reply)
    page.locator("#words").fill(EVIL)
    page.keyboard.press("Enter")
    page.get_by_text("1 tokens in").wait_for()
    if logprobs:
        page.locator(".token").first.click()
    page.unroute(f"**{CHAT}")
    page.route(f"**{CHAT}", lambda route: route.fulfill(status=502, body=f"<h1>Bad</h1>{EVIL}"))
    page.locator("#words").fill("Again.")
    page.keyboard.press("Enter")
    bad = page.locator(".said .bad").last
    bad.wait_for()
    seen.forgive("502")
    text = page.locator("#talk").inner_text()
    assert text.count('<img src=x onerror="window.hacked=1">\\u202egnp.exe\\u2066') >= 3, "you, the answer, the error"
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", text), "nothing reorders what stands around it"
    assert page.locator("#talk img, #talk script, #talk h1").count() == 0 and page.evaluate("window.hacked") is None
    assert bad.inner_text().startswith("502 ")


def test_a_refusal_is_readable_and_can_be_fixed(tiny: str, open_page: Open) -> None:
    seen = open_page(tiny)
    set_fields(seen.page, temperature="101")
    seen.page.locator("#words").focus()
    ask(seen, "Hello.")
    bad = seen.page.locator(".said .bad")
    bad.wait_for()
    assert "temperature is 101" in bad.inner_text() and "expected: a number from 0 to 100" in bad.inner_text()
    seen.forgive("400")
    assert seen.page.locator("#words").input_value() == "Hello.", "what was written is not lost"
    set_fields(seen.page, temperature="1")
    seen.page.locator("#words").focus()
    seen.page.keyboard.press("Enter")
    answered(seen)
    assert seen.bodies[1]["messages"] == [{"role": "user", "content": "Hello."}], "the refused one is no part of it"
    set_fields(seen.page, seed="9007199254740993")  # 2^53 + 1, which a browser's numbers do not hold
    seen.page.locator("#words").focus()
    seen.page.keyboard.type("Hello.")
    seen.page.keyboard.press("Enter")
    seen.page.get_by_text("seed is no whole number").wait_for()
    assert len(seen.bodies) == 2, "nothing is asked with another seed than the one that was written"


def test_a_reload_keeps_nothing(tiny_with_key: str, open_page: Open) -> None:
    seen = open_page(tiny_with_key)
    page = seen.page
    seen.wait("#notice", "API key is missing")
    seen.forgive("401")
    set_fields(page, key=KEY, system="secret", words="secret")
    page.reload()
    seen.wait("#notice", "API key is missing")
    seen.forgive("401")
    for name in ("key", "system", "words"):
        assert page.locator(f"#{name}").input_value() == "", name
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert page.url == tiny_with_key + "/" and page.context.cookies() == []


def test_an_api_key(tiny_with_key: str, open_page: Open) -> None:
    seen = open_page(tiny_with_key)
    page = seen.page
    page.get_by_text("the API key is missing").wait_for()
    ask(seen, "Hello.")
    page.locator(".said .bad").wait_for()
    assert "API key is missing" in page.locator(".said .bad").inner_text()
    seen.forgive("401")
    page.get_by_label("API key").focus()
    page.keyboard.type(KEY)
    page.keyboard.press("Tab")
    seen.wait("#model", "^tiny$")
    assert page.locator("#notice").inner_text() == "" and page.locator("#key").get_attribute("type") == "password"
    page.locator("#words").focus()
    page.keyboard.press("Enter")  # what was refused still stands there
    answered(seen)
    assert all(KEY not in r.url for r in seen.requests)
    with page.context.expect_page() as opened:
        page.locator("#timeline").click()
    opened.value.locator("rect.block").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_control_has_a_name_and_fits(tiny: str, open_page: Open, size: tuple[int, int], scheme: str) -> None:
    seen = open_page(tiny, size=size, scheme=scheme)
    page = seen.page
    assert page.locator("#settings summary").is_visible() == (size == PHONE) != page.locator("#model").is_visible()
    assert nameless(page) == [] and overflow(page) == 0
    if size == PHONE:
        page.locator("#settings summary").click()
    page.get_by_role("checkbox", name="log probabilities").check()
    page.locator("#words").focus()
    ask(seen, "Tell me of " + "x" * 200)
    answered(seen)
    page.locator(".token").first.click()
    page.locator(".trace summary").click()
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)
    box = page.locator("#send").bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= size[0] and box["y"] + box["height"] <= size[1]
