"""What the client costs, and whether client and null server keep time under load: in processes of their own."""

import json
import resource
import subprocess
import sys
import time

import numpy as np
import pytest

from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess

pytestmark = pytest.mark.alone
MAX_OF_A_CORE = 0.30
# Streams begin one after the other within the time of a token, as they would after a warm-up: not all in one burst.
CLIENT = """
import asyncio, json, sys, time, uvloop
from millrace.bench.client.request_record import BenchMessage, BenchRequest
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
url, streams, n_tokens, gap_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
async def one(client, i):
    await asyncio.sleep(i * gap_s)
    return await client.ask(BenchRequest([BenchMessage("user", "Hello there")], n_tokens))
async def main():
    async with Client(BenchTarget(url, CHAT)) as client:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(*(one(client, i) for i in range(streams)))
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    told = [(a.id, a.sent_s, a.chunk_s) for a in answers if a.failure is None]
    print(json.dumps({"share": cpu_s / wall_s, "answers": told}))
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize(
    "streams, rate, n_tokens",
    [
        (64, 50, 100),
        pytest.param(64, 50, 500, marks=pytest.mark.timing),
        pytest.param(512, 5, 50, marks=pytest.mark.timing),
    ],
)  # fmt: skip
def test_the_client_costs_little_and_both_keep_time(
    request: pytest.FixtureRequest, streams: int, rate: int, n_tokens: int
) -> None:
    with NullProcess(NullTiming(ttft_ms="normal:150,20", itl_ms=str(1000 / rate))) as server:
        arguments = [server.url, str(streams), str(n_tokens), str(1 / rate / streams)]
        done = subprocess.run([sys.executable, "-c", CLIENT, *arguments], capture_output=True, check=True)
        truth = server.truth
    told = json.loads(done.stdout)
    assert len(told["answers"]) == streams
    late, delay = [], []
    for name, _, chunk_s in told["answers"]:
        sent = truth[name]
        late.append(np.array(sent.sent_s) - sent.arrived_s - np.array(sent.due_s))
        delay.append(np.array(chunk_s) - np.array(sent.sent_s))
    if request.node.get_closest_marker("timing"):  # a line of JSON, which a night keeps with its result
        p50, p99 = 1e3 * np.percentile(np.concatenate(delay), (50, 99))
        figures = {
            "core": told["share"],
            "stamp_ms_p50": p50,
            "stamp_ms_p99": p99,
            "null_late_ms": 1e3 * np.median(late),
        }
        sys.stdout.write(json.dumps({f"client_{streams}_{name}": round(v, 3) for name, v in figures.items()}) + "\n")
    assert told["share"] < MAX_OF_A_CORE
    assert np.min(late) >= 0 and np.median(late) < 2e-3, "the server sends when it said"
    assert np.min(delay) >= 0 and np.median(delay) < 1e-3, "the client stamps when bytes arrive"


@pytest.mark.timing
def test_the_command_costs_little() -> None:
    """`millrace bench` as users run it, its start and its report included: the processor time of its whole process."""
    with NullProcess(NullTiming(ttft_ms="normal:150,20", itl_ms="20")) as server:
        command = [sys.executable, "-m", "millrace", "bench", server.url, "--model", "m", "--concurrency", "64"]
        command += ["--request-count", "192", "--isl", "16", "--osl", "500", "--ignore-eos", "--ramp-s", "2"]
        began_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*command, "--certify-s", "0", "--json"], capture_output=True, check=True)
        took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(done.stdout)
    assert told["requests"]["whole"] == 192 and took_s > 30
    share = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / took_s
    said = told["client"]["cpu_share"]
    sys.stdout.write(json.dumps({"command_64_core": round(share, 3), "command_64_told": round(said, 3)}) + "\n")
    assert share < MAX_OF_A_CORE and abs(said - share) < 0.1
