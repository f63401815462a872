"""Clients that send expensive schemas in a loop delay neither another client's schema nor another stream's tokens."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.live import MODEL, Live

pytestmark = pytest.mark.timing
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
N_CLIENTS, PERIOD_S = 4, 6.0
MAX_LATER_S, MAX_APART_S = 0.5, 0.05


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **fields}


def keys(name: str, n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{name}_{i}": {"type": "string"} for i in range(n)}}


def measured(server: Live, n_keys: int, n_clients: int) -> tuple[float, float]:
    """Seconds: of another client's request with a new schema, and between two tokens of a stream (the 99th of 100)."""
    over = threading.Event()
    gaps: list[float] = []
    requests: list[float] = []

    def send_large(client: httpx.Client, i: int) -> None:
        reply = client.post(
            CHAT, json=body(max_tokens=2, guided_json=keys(f"{n_clients}_{time.perf_counter()}", n_keys))
        )
        assert reply.status_code in (200, 400), reply.text

    def send_small(client: httpx.Client, i: int) -> None:
        began = time.perf_counter()
        schema = {**keys(f"small_{n_clients}_{i}", 1), "additionalProperties": False}
        assert client.post(CHAT, json=body(max_tokens=2, guided_json=schema)).status_code == 200
        requests.append(time.perf_counter() - began)
        time.sleep(0.05)

    def read(client: httpx.Client, i: int) -> None:
        with client.stream("POST", CHAT, json=body(max_tokens=400, ignore_eos=True, stream=True)) as answer:
            times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
        gaps.extend(np.diff(times))

    def loop(work: Callable[[httpx.Client, int], None]) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            i = 0
            while not over.is_set():
                work(client, i)
                i += 1

    threads = [threading.Thread(target=loop, args=(work,)) for work in (read, send_small, *[send_large] * n_clients)]
    for thread in threads:
        thread.start()
    time.sleep(PERIOD_S)
    over.set()
    for thread in threads:
        thread.join()
    return float(np.percentile(requests, 99)), float(np.percentile(gaps, 99))


@pytest.mark.parametrize("n_keys", [3000, 480])
def test_large_schemas_of_others_delay_nobody(tiny: Live, n_keys: int) -> None:
    alone, beside = measured(tiny, n_keys, 0), measured(tiny, n_keys, N_CLIENTS)
    assert beside[0] <= alone[0] + MAX_LATER_S, (alone, beside)
    assert beside[1] <= alone[1] + MAX_APART_S, (alone, beside)
