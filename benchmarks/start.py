"""What happens before the first token: building from a checkpoint, starting a process, and what it holds in memory.

    python -m benchmarks.start --shape tinyllama-1.1b
    python -m benchmarks.start --shape tinyllama-1.1b --precision auto --rounds 1

Writes a checkpoint of random bfloat16 weights as Hugging Face lays it out, so the page cache holds it; builds an engine
with the command line, then starts processes that answer a prompt of 32 tokens with one. Writes
results/start-SHAPE-TIME-COMMIT.json.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import write_checkpoint
from benchmarks.names import named
from benchmarks.record import judged, provenance, shape_command
from millrace.engine.artifact.engine import Engine

PROMPT = 32
# Asks as a program would, and tells what of its own memory is neither weights nor KV pages.
ASK = """
import json, sys
from pathlib import Path
from millrace import LLM, SamplingParams
with LLM(sys.argv[1], kv_memory="64M") as llm:
    llm.generate({"prompt_token_ids": [5] * int(sys.argv[2])}, SamplingParams(max_tokens=1, temperature=0))
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    plan = llm._opened.plan
    rss = int(lines["VmRSS"].split()[0]) * 1024
    print(json.dumps({"rss": rss, "weights": plan.weights_bytes, "kv": plan.kv_bytes}))
"""


def timed(*command: str | Path) -> float:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "millrace", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"millrace {command[0]} failed:\n{done.stderr}")
    return time.perf_counter() - started


def goals(precision: str, build_s: float, start_s: float, beyond_bytes: int) -> list[dict[str, Any]]:
    """What this project set out to reach."""
    what, bound_s = ("build with a choice of precision", 60) if precision == "auto" else ("build", 15)
    return [
        judged(f"{what}, seconds", build_s, bound_s, bound_s, at_most=True),
        judged("process start to first token, seconds", start_s, 1.0, 1.0, at_most=True),
        judged("resident beyond weights and KV, MiB", beyond_bytes / 2**20, 150, 150, at_most=True),
    ]


def run(shape: str, precision: str, rounds: int, folder: Path) -> dict[str, Any]:
    checkpoint = folder / "checkpoint"
    write_checkpoint(shape, checkpoint)
    builds = []
    for i in range(2):
        engine = folder / f"engine{i}"
        builds.append(timed("build", checkpoint, "-o", engine, "--precision", precision))
    ask = ("generate", engine, "-p", "a" * PROMPT, "--max-tokens", "1", "--temperature", "0")
    timed(*ask)  # warms the page cache
    starts = [timed(*ask) for _ in range(rounds)]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    held = json.loads(subprocess.check_output([sys.executable, "-c", ASK, engine, str(PROMPT)], text=True, env=env))
    build_s, start_s = statistics.median(builds), statistics.median(starts)
    beyond = held["rss"] - held["weights"] - held["kv"]
    return {
        **provenance("benchmarks.start"), "shape": shape, "precision": precision, **named(Engine.open(engine)),
        "build_s": build_s, "builds_s": builds, "start_to_first_token_s": start_s, "starts_s": starts,
        "resident_bytes": held["rss"], "weights_bytes": held["weights"], "kv_bytes": held["kv"],
        "resident_beyond_bytes": beyond,
        "goals": goals(precision, build_s, start_s, beyond),
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    return "\n".join([
        f"{result['shape']} {result['precision']}",
        f"  build, checkpoint in the page cache   {result['build_s']:.1f} s",
        f"  process start to first token          {result['start_to_first_token_s']:.2f} s",
        f"  resident beyond weights and KV        {result['resident_beyond_bytes'] / 2**20:.0f} MiB",
    ])  # fmt: skip


if __name__ == "__main__":
    shape_command("start", __doc__, run, summary)
