"""Many clients with one long beginning in common, of which some go away: no growth, and no wrong token.

    python -m tools.load tiny --seconds 600
    python -m tools.load tiny --clients 200 --shared 700 --leaving 0.3

Serves MODEL, asks each of some questions alone, then all clients ask them again and again side by side, streamed; those
that leave do so in the middle of an answer. KV pages are too few for them: some are evicted, and some answers give way
and are computed again. Each answer must be the one that it was alone. Prints one line of JSON; the exit code is 1 where
a token was wrong, memory grew, pages stayed in use, or there were pages enough.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx
import psutil  # type: ignore[import-untyped]

from millrace.bench.run.server_process import ServerProcess

PATH = "/v1/completions"
MAX_GROWTH_BYTES = 24 * 2**20  # after the first fifth of the time, and an answer for each fifth client,
SETTLED_S = 60.0  # where that is long enough for connections and pages to have been there
WORDS = tuple(
    re.findall(r"\w+", "the river runs past a mill and the miller counts his sacks while the wheel turns slowly")
)


@dataclass
class Outcome:
    seconds: float
    clients: int
    answers: int = 0
    left: int = 0
    refused: int = 0
    wrong: int = 0
    tokens_reused: float = 0.0  # share of all prompt tokens
    evicted: int = 0  # pages
    preempted: int = 0  # answers
    grown_bytes: int = 0
    pages_used: float = 0.0

    @property
    def is_good(self) -> bool:
        done = self.answers > (self.clients if self.seconds >= SETTLED_S else 0) and self.left > 0
        grows = self.seconds >= SETTLED_S and self.grown_bytes >= MAX_GROWTH_BYTES
        was_short = self.evicted > 0 and (self.preempted > 0 or self.seconds < SETTLED_S)
        return done and was_short and not self.wrong and not self.pages_used and not grows


@dataclass(frozen=True)
class Load:
    url: str
    shared: str
    leaving: float
    questions: int

    def body(self, question: int) -> dict[str, object]:
        prompt = f"{self.shared} {' '.join(WORDS[: 1 + question % len(WORDS)])}"
        return {
            "prompt": prompt, "seed": question, "temperature": 1.0, "max_tokens": 8 + 24 * (question % 8),
            "ignore_eos": True, "stream": True,
        }  # fmt: skip

    async def ask(self, client: httpx.AsyncClient, question: int, leave_after: int | None = None) -> str | None:
        """The text, or what there was of it when the client left; None where the queue was full."""
        text, n_events = "", 0
        async with client.stream("POST", self.url + PATH, json=self.body(question)) as reply:
            if reply.status_code == 429:
                return None
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    n_events += 1
                    if n_events == leave_after:
                        break
        return text


async def run(load: Load, process: psutil.Process, outcome: Outcome) -> None:
    limits = httpx.Limits(max_connections=outcome.clients)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        alone = [await load.ask(client, question) for question in range(load.questions)]
        until_s = time.monotonic() + outcome.seconds
        settled_s, settled_bytes = until_s - 0.8 * outcome.seconds, 0

        async def one(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < until_s:
                question = rng.randrange(load.questions)
                leave_after = rng.randint(1, 6) if rng.random() < load.leaving else None
                text = await load.ask(client, question, leave_after)
                right = alone[question] or ""
                if text is None:
                    outcome.refused += 1
                    await asyncio.sleep(0.1)
                elif leave_after is None:
                    outcome.answers += 1
                    outcome.wrong += text != right
                else:
                    outcome.left += 1
                    outcome.wrong += not right.startswith(text)

        async def watch() -> None:
            nonlocal settled_bytes
            await asyncio.sleep(max(0.0, settled_s - time.monotonic()))
            while outcome.answers + outcome.left < outcome.clients / 5 and time.monotonic() < until_s:
                await asyncio.sleep(0.05)  # on a busy machine connections are still being made
            settled_bytes = process.memory_info().rss

        await asyncio.gather(watch(), *(one(number) for number in range(outcome.clients)))
        outcome.grown_bytes = process.memory_info().rss - settled_bytes
        await settle(client, load.url, outcome)


async def settle(client: httpx.AsyncClient, url: str, outcome: Outcome) -> None:
    """Those who left have to be noticed."""
    for _ in range(200):
        text = (await client.get(url + "/metrics")).text
        outcome.pages_used = metric(text, "millrace:kv_pages_used{")
        if not outcome.pages_used:
            break
        await asyncio.sleep(0.05)
    queried = metric(text, "vllm:prefix_cache_queries_total{")
    outcome.evicted = int(metric(text, "millrace:kv_pages_evicted_total{"))
    outcome.preempted = int(metric(text, "vllm:num_preemptions_total{"))
    outcome.tokens_reused = round(metric(text, "vllm:prefix_cache_hits_total{") / max(1.0, queried), 4)


def metric(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--shared", type=int, default=700, help="words in common: for `tiny` 1,350 tokens")
    parser.add_argument("--leaving", type=float, default=0.3, help="share of the clients' requests that are left")
    parser.add_argument("--questions", type=int, default=48, help="that differ in their ends")
    parser.add_argument("--kv-memory", default="5M", help="for pages; the default is short for `tiny`")
    args = parser.parse_args(arguments)
    shared = " ".join(random.Random(0).choices(WORDS, k=args.shared))
    outcome = Outcome(args.seconds, args.clients)
    before = set(psutil.Process().children())
    flags = ("--log-level", "error", "--kv-memory", args.kv_memory)
    with ServerProcess(args.model, flags) as server:
        (process,) = set(psutil.Process().children()) - before
        asyncio.run(run(Load(server.url, shared, args.leaving, args.questions), process, outcome))
    print(json.dumps(asdict(outcome)))
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
