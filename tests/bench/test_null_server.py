"""The null server keeps its times, and says what it did; asked by a client that is not ours."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.bench.load.distribution import Spread
from millrace.bench.null_server.ledger import NullTiming
from millrace.errors import ConfigError
from tests.bench.conftest import Null

N = 20_000
QUICK = NullTiming(ttft_ms="normal:30,10", itl_ms="exponential:8", seed=3)
BODY = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 7, "stream": True}


@pytest.mark.parametrize(
    "text, mean, deviation",
    [("50", 50, 0), ("normal:50,5", 50, 5), ("lognormal:50,40", 50, 40), ("exponential:50", 50, 50),
     ("lognormal:0,3", 0, 0), ("exponential:0", 0, 0)],
)  # fmt: skip
def test_a_spread_has_the_moments_that_it_names(text: str, mean: float, deviation: float) -> None:
    import random

    rng, spread = random.Random(1), Spread.parse(text, "--x")
    drawn = np.array([spread.draw(rng) for _ in range(N)])
    assert abs(drawn.mean() - mean) <= 4 * deviation / np.sqrt(N)
    assert abs(drawn.std() - deviation) <= 0.06 * deviation and drawn.min() >= 0


def test_what_a_normal_one_draws_below_zero_is_zero() -> None:
    import random

    rng = random.Random(2)
    drawn = [Spread.normal(0, 10).draw(rng) for _ in range(1000)]
    assert min(drawn) == 0 and 400 < drawn.count(0) < 600


@pytest.mark.parametrize("text", ["", "fast", "normal:5", "normal:5,6,7", "gauss:1,2", "exponential:-1", "nan", "1e99"])
def test_what_is_no_spread(text: str) -> None:
    with pytest.raises(ConfigError):
        Spread.parse(text, "--isl")


def test_times_are_drawn_by_seed_and_number() -> None:
    one, other = QUICK.token_s(1, 50), NullTiming(ttft_ms="normal:30,10", itl_ms="exponential:8", seed=4).token_s(1, 50)
    assert one == QUICK.token_s(1, 50) and one[:20] == QUICK.token_s(1, 20), "however long the answer is"
    assert one != QUICK.token_s(2, 50) and one != other


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_stream_is_sent_when_it_is_due_and_no_earlier(null: Null) -> None:
    server = null(QUICK)
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, headers={"x-request-id": "in-time"})
    told = events(reply)
    texts = [e["choices"][0]["delta"].get("content") for e in told if e["choices"]]
    assert texts == [" mill"] * 7 + [None] and told[-1]["usage"]["completion_tokens"] == 7
    assert told[-1]["usage"]["prompt_tokens"] == 3
    sent = server.truth["in-time"]
    late = np.array(sent.sent_s) - sent.arrived_s - np.array(sent.due_s)
    assert late.min() >= 0 and np.median(late) < 0.01 and sent.n_tokens == [1] * 7


def test_several_tokens_share_a_chunk_and_the_usage_says_so(null: Null) -> None:
    server = null(NullTiming(ttft_ms="5", itl_ms="2", tokens_per_chunk=3))
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={**BODY, "stream_options": options})
    chunks = [e for e in events(reply) if e["choices"] and e["choices"][0]["delta"]]
    assert [len(e["choices"][0]["delta"]["content"].split()) for e in chunks] == [3, 3, 1]
    assert [e["usage"]["completion_tokens"] for e in chunks] == [3, 6, 7]


def test_what_it_does_not_know(null: Null) -> None:
    url = null(QUICK).url
    assert httpx.post(f"{url}/v1/nothing", json={}).status_code == 404
    assert httpx.post(f"{url}/v1/completions", content=b"{").status_code == 400
