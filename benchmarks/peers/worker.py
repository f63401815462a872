"""One engine in a process of its own: `python -m benchmarks.peers.worker ENGINE SUBJECT FOLDER THREADS`.

Between requests it blocks on its standard input, so that its threads sleep while another engine is measured. The
machine's read bandwidth is measured here, right before and after each run. Requests and replies are lines of JSON;
whatever the engine's libraries print goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.measure import bandwidth
from benchmarks.peers.engine import CATALOGUE, Engine, Reads
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import CHECKED, WORKLOADS
from millrace.kernels.library import usable_isas

SETTLE_S = 0.05  # until the engine's threads have stopped spinning
Probe = Callable[[], float]  # bytes a second


def serve(engine: Engine, requests: TextIO, replies: TextIO, probe: Probe) -> None:
    """Until the requests end: {"do": "warm_up" | "run", "workload": name}, {"do": "describe"}, or {"do": "read",
    "workload": path of a text}, which writes what the engine says to it beside the text."""
    for line in requests:
        request = json.loads(line)
        _reply(replies, _done(engine, request, probe))


def _done(engine: Engine, request: dict[str, str], probe: Probe) -> dict[str, Any]:
    match request["do"]:
        case "warm_up":
            engine.warm_up(WORKLOADS[request["workload"]])
            return {}
        case "run":
            before = probe()
            seconds = engine.run(WORKLOADS[request["workload"]])
            time.sleep(SETTLE_S)
            return {"seconds": seconds, "read_before": before, "read_after": probe()}
        case "read":
            return {"read": read(engine, Path(request["workload"]))}
        case "describe":
            return {
                **asdict(engine.describe()), "huge_pages_bytes": huge_pages(),
                "logits": engine.logits(CHECKED).tolist(),
            }  # fmt: skip
        case other:
            raise ValueError(f"unknown request {other!r}")


def read(engine: Engine, text: Path) -> str | None:
    """The file of its log probabilities, (sequences, tokens, vocabulary) in float32; None: it cannot give them.

    text: a file NAME-FIRST.npy of token ids (sequences, length); those behind position FIRST of each are predicted
    """
    if not isinstance(engine, Reads):
        return None
    ids, first = np.load(text), int(text.stem.rpartition("-")[2])
    out = text.with_name("answers.npy")
    np.save(out, np.stack([engine.read(sequence, first) for sequence in ids]))
    return str(out)


def huge_pages() -> int:
    """Bytes of this process in huge pages; 0 where the kernel does not say."""
    try:
        told = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("AnonHugePages"))


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def main() -> None:
    name, subject, folder, threads = sys.argv[1:]
    # C libraries write to descriptor 1: the replies keep the pipe, everything else goes to stderr
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        weights, begun = NamedWeights.named(subject), time.perf_counter()
        CATALOGUE[name].prepare(weights, Path(folder))
        prepared_s = time.perf_counter() - begun
        engine = CATALOGUE[name].load(weights, Path(folder), int(threads))
        _reply(replies, {"ready": name, "prepared_s": prepared_s})
        serve(engine, sys.stdin, replies, lambda: bandwidth(usable_isas()[0], int(threads)))


if __name__ == "__main__":
    main()
