"""What the prefill budget costs and saves on a busy machine: a server of a real model beside processor hogs.

    python -m benchmarks.busy_machine [--hogs 2] [--rounds 5]

Three servers of SmolLM2-135M-Instruct (its Q4_1 file) that differ in their prefill budget alone take turns: the
current one, the largest chunk, and the one of before, which learned a prompt token's cost from slow steps and never
tried longer chunks again. USERS clients send prompts of about 128 tokens and wait for NEW tokens each. Medians of the
rounds of the time to the first token (median, 95th percentile) and of prompt and output tokens per second; the first
round warms up. MILLRACE_ISA=avx2 measures without wider instruction sets. Writes results/busy-TIME-COMMIT.json.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.record import count, judged, provenance, write_result
from millrace.bench.client.demo_client import DemoChatRequest, ask_all, quantile
from millrace.cli.main import main as millrace
from millrace.env import widest_isa
from millrace.runtime.scheduling import token_budget
from millrace.runtime.scheduling.token_budget import OUTLIER, SMOOTHING, TokenBudget
from tools.nightly.packages import smollm2

USERS, REQUESTS, WORDS, NEW = 8, 24, 120, 48
BUDGETS = ("current", "largest", "before")
_STOP_S = 30


@dataclass(slots=True)
class Largest(TokenBudget):
    """Prompts are cut by the size of a step alone."""

    def prefill_tokens(self, n_decode: int, n_pending: int = 1) -> int:
        return self.max_step_tokens - n_decode


@dataclass(slots=True)
class Before(TokenBudget):
    """The budget of versions before the Kalman filter: means of a plain step and of a prompt token's time."""

    def observe(self, n_prefill: int, step_time_s: float, n_decode: int = 0) -> None:
        if n_prefill == 0:
            self.step_s = _moved(self.step_s, step_time_s, SMOOTHING)
        else:
            rest_s = max(0.0, step_time_s - (self.step_s or 0.0))
            weight = SMOOTHING * min(1.0, n_prefill / self.chunk_low)
            self.token_s = _moved(self.token_s, rest_s / n_prefill, weight)

    def prefill_tokens(self, n_decode: int, n_pending: int = 1) -> int:
        room = self.max_step_tokens - n_decode
        if not n_decode:
            return room
        if not self.token_s:
            return min(room, self.chunk_low)
        plain_s = self.step_s or 0.0
        limit_s = min(self.gap_limit_s, self.stretch * plain_s) if plain_s else self.gap_limit_s
        fitting = int((limit_s - plain_s) / self.token_s)
        return min(room, max(self.chunk_low, min(fitting, self.max_step_tokens)))


def _moved(old: float | None, sample: float, weight: float) -> float:
    return old + weight * (min(sample, OUTLIER * old) - old) if old else sample


def serve_with(budget: str, arguments: list[str]) -> None:
    """`millrace serve` with that budget, in this process."""
    found = {"current": TokenBudget, "largest": Largest, "before": Before}[budget]
    token_budget.TokenBudget = found  # type: ignore
    from millrace.cli.serve import run as serve_command

    serve_command.TokenBudget = found  # type: ignore
    sys.argv = ["millrace", "serve", *arguments]
    millrace()


@contextlib.contextmanager
def served(budget: str) -> Iterator[str]:
    """The server's URL."""
    command = [sys.executable, "-m", "benchmarks.busy_machine", "--serve", budget, str(smollm2())]
    flags = ["--port", "0", "--json", "--log-level", "warning", "--no-prefix-cache"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()
            process.wait(_STOP_S)


@contextlib.contextmanager
def hogs(n: int) -> Iterator[None]:
    """So many processes that compute as long as they may."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def sample(url: str, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    words = "the of a river stone light under over quick small bird tree house morning water road".split()  # noqa: SIM905
    asks = [
        DemoChatRequest(" ".join(draw.choices(words, k=WORDS)), NEW, seed=i, ignore_eos=True) for i in range(REQUESTS)
    ]
    heard, seconds = ask_all(url, asks, USERS)
    ttft_s = [one.ttft_s for one in heard]
    gaps_s = [b - a for one in heard for a, b in zip(one.chunk_s, one.chunk_s[1:], strict=False)]
    return {
        "ttft_p50_s": statistics.median(ttft_s), "ttft_p95_s": quantile(ttft_s, 0.95),
        "gap_p50_s": statistics.median(gaps_s), "gap_p99_s": quantile(gaps_s, 0.99),
        "tokens_per_s": sum(one.n_prompt + one.n_output for one in heard) / seconds,
        "prompt_tokens": statistics.mean(one.n_prompt for one in heard),
    }  # fmt: skip


def run(n_hogs: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {budget: [] for budget in BUDGETS}
    with contextlib.ExitStack() as running:
        urls = {budget: running.enter_context(served(budget)) for budget in BUDGETS}
        with hogs(n_hogs):
            for i in range(rounds + 1):
                for budget, url in urls.items():
                    one = sample(url, i)
                    if i:
                        found[budget].append(one)
    medians = {b: {k: statistics.median(s[k] for s in ones) for k in ones[0]} for b, ones in found.items()}
    return {**provenance("benchmarks.busy_machine"), "model": smollm2().name, "isa": widest_isa() or "all",
            "hogs": n_hogs, "users": USERS, "requests": REQUESTS, "output_tokens": NEW,
            "samples": found, "medians": medians, "goals": [goal(found)]}  # fmt: skip


def goal(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """What the budget may cost, by ratios within a round."""
    pairs = zip(samples["current"], samples["largest"], strict=True)
    ratios = [ours["tokens_per_s"] / largest["tokens_per_s"] for ours, largest in pairs]
    return judged("tokens/s on a busy machine, of the largest chunk's", statistics.median(ratios), 0.85, 0.85)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve_with(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hogs", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=5)
    said = parser.parse_args()
    result = run(said.hogs, said.rounds)
    for budget, of_one in result["medians"].items():
        print(f"{budget:8}", "  ".join(f"{key} {value:.3f}" for key, value in of_one.items()))
    print(result["goals"][0])
    write_result("busy", result)


if __name__ == "__main__":
    main()
