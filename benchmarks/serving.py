"""What the server costs: the same requests over HTTP and in process, in turn.

    python -m benchmarks.serving --shape tinyllama-1.1b

Clients stream chat completions from `millrace serve`, all at once, each a request of PROMPT tokens for NEW more; then
the same tokens are asked of the same engine in this process. Clients, server and engine share the cores, as they do
where everything runs on one machine. Writes
results/serving-SHAPE-TIME-COMMIT.json.
"""

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import write_checkpoint
from benchmarks.names import named
from benchmarks.record import provenance, shape_command
from benchmarks.start import timed
from millrace.api.offline_generate import generate
from millrace.bench.client.demo_client import DemoChatRequest, ask_all, quantile
from millrace.bench.run.server_process import ServerProcess
from millrace.engine.artifact.engine import Engine
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import open_engine
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.settings import RunSettings

USERS, PROMPT, NEW = (1, 16), 128, 64


def over_http(url: str, users: int) -> dict[str, float]:
    """Prompts differ, so that no client is answered from what another asked."""
    asks = [DemoChatRequest(chr(ord("a") + i) * PROMPT, NEW, seed=i, ignore_eos=True) for i in range(users)]
    heard, seconds = ask_all(url, asks, users)
    assert all(h.n_output == NEW for h in heard)
    return {"seconds": seconds, "ttft_s": quantile([h.ttft_s for h in heard], 0.5)}


def in_process(loop: EngineLoop, users: int) -> float:
    prompts = [loop.tokenizer.encode(chr(ord("a") + i) * PROMPT) for i in range(users)]
    params = [SamplingParams(max_tokens=NEW, seed=i, ignore_eos=True) for i in range(users)]
    started = time.perf_counter()
    generate(loop, prompts, params)
    return time.perf_counter() - started


def run(shape: str, precision: str, rounds: int, folder: Path) -> dict[str, Any]:
    checkpoint, built = folder / "checkpoint", folder / "engine"
    write_checkpoint(shape, checkpoint)
    timed("build", checkpoint, "-o", built, "--precision", precision)
    model = open_engine(shape, Engine.open(built), RunSettings(prefix_cache=False))
    loop, found = model.loop(), []
    try:
        with ServerProcess(built, ("--log-level", "warning", "--no-prefix-cache")) as server:
            for users in USERS:
                over_http(server.url, users), in_process(loop, users)  # warms up
                pairs = [(over_http(server.url, users), in_process(loop, users)) for _ in range(rounds)]
                found.append({
                    "users": users, "http": [h for h, _ in pairs], "in_process_s": [s for _, s in pairs],
                    "http_tokens_per_s": users * NEW / statistics.median(h["seconds"] for h, _ in pairs),
                    "in_process_tokens_per_s": users * NEW / statistics.median(s for _, s in pairs),
                    "cost": statistics.median(1 - s / h["seconds"] for h, s in pairs),
                })  # fmt: skip
    finally:
        model.close()
    return {
        **provenance("benchmarks.serving"), "shape": shape, "precision": precision, **named(Engine.open(built)),
        "prompt": PROMPT, "new": NEW, "loads": found,
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    lines = [f"{result['shape']} {result['precision']}, prompt {PROMPT}, {NEW} new tokens each, prompts included"]
    for load in result["loads"]:
        http, alone = load["http_tokens_per_s"], load["in_process_tokens_per_s"]
        lines.append(
            f"  {load['users']:2} users: {http:.0f} tok/s over HTTP, {alone:.0f} in process; cost {load['cost']:.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    shape_command("serving", __doc__, run, summary)
