"""AIPerf and `millrace bench` in turns, each alone, on a server whose times are known; needs an idle machine.

    python -m tools.beside_aiperf

Installs AIPerf into build/clients/aiperf. At each load both measure TTFT, inter-token latency and tokens/s on null
servers of their own, in rounds that change their order; what the servers did stands beside it. Only loads at which our
client is certified are judged. The last line is JSON. Exit code 0: all agree within 3 %, or where they do not, ours is
within 2 % of what the server did, and docs/bench.md explains the rest; and AIPerf's own models read our files.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.bench.null_server.ledger import NullTiming, Sent
from millrace.bench.null_server.process import NullProcess
from tools.clients.catalogue import CLIENTS
from tools.nightly.packages import BUILD, ROOT, environment

ROUNDS, ISL, OSL, ITL_MS = 2, 100, 50, 20
RAMP_S = 1  # an answer's time: streams that begin as one stay so on a server of fixed times, and wait for each other
LOADS = ((1, 30), (16, 192), (64, 512))  # streams, requests
TTFT_MS = (100, 300)
AGREE, TRUE = 0.03, 0.02
TIMEOUT_S = 300
METRICS = {
    "ttft_ms": "time_to_first_token", "itl_ms": "inter_token_latency", "tokens_per_s": "output_token_throughput",
}  # fmt: skip
# AIPerf's own look into its TTFT: it takes up a request after its credit, connects, sends, and waits for the first byte
STAGES = ("credit_to_start_latency", "http_req_connecting", "http_req_sending", "http_req_waiting")
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one tool. told, truth: by METRICS; stages: of AIPerf; valid: our certificate"""

    told: Figures
    truth: Figures
    stages: Figures
    valid: bool | None = None


def ours(url: str, streams: int, requests: int, folder: Path, bin_: Path) -> list[str]:
    return [
        sys.executable, "-m", "millrace", "bench", url, "--model", "m", "--concurrency", f"{streams}",
        "--request-count", f"{requests}", "--isl", f"{ISL}", "--osl", f"{OSL}", "--ignore-eos", "--ramp-s", f"{RAMP_S}",
        "-o", str(folder),
    ]  # fmt: skip


def theirs(url: str, streams: int, requests: int, folder: Path, bin_: Path) -> list[str]:
    return [
        str(bin_ / "aiperf"), "profile", "--model", "m", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(ROOT / "src" / "millrace" / "bundled" / "tiny"), "--concurrency", f"{streams}",
        "--request-count", f"{requests}", "--synthetic-input-tokens-mean", f"{ISL}", "--output-tokens-mean", f"{OSL}",
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none", "--artifact-dir", str(folder),
        "--concurrency-ramp-duration", f"{RAMP_S}",
    ]  # fmt: skip


TOOLS = {"ours": ours, "theirs": theirs}


def measured(tool: str, ttft_ms: int, load: tuple[int, int], folder: Path, bin_: Path) -> Measured:
    """raises AssertionError where the tool fails"""
    # told that the hub is offline, AIPerf takes a folder's path for the name of a repository
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    variables |= {"PATH": f"{bin_}:{variables['PATH']}", "DO_NOT_TRACK": "1"}
    with NullProcess(NullTiming(str(ttft_ms), str(ITL_MS))) as server:
        command = TOOLS[tool](server.url, *load, folder, bin_)
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables)
        assert done.returncode == 0, (done.stdout + done.stderr)[-1000:]
        truth = server.truth
    (written,) = folder.glob("**/profile_export_aiperf.json")
    told = json.loads(written.read_text())
    lines = [json.loads(line) for line in written.with_name("profile_export.jsonl").read_text().splitlines()]
    sent = [truth[line["metadata"]["x_request_id"]] for line in lines]
    assert len(sent) == load[1], f"{len(sent)} answers of {load[1]}"
    summary = folder / "summary.json"
    valid = json.loads(summary.read_text())["valid"] if tool == "ours" else None
    stages = {name: told[name]["avg"] for name in STAGES if name in told}
    return Measured({ours: told[name]["avg"] for ours, name in METRICS.items()}, true_of(sent), stages, valid)


def true_of(sent: Sequence[Sent]) -> dict[str, float]:
    """What the server did, by its own stamps."""
    tokens = [sum(s.n_tokens) for s in sent]
    itl_s = [(s.sent_s[-1] - s.sent_s[0]) / (n - 1) for s, n in zip(sent, tokens, strict=True)]
    span_s = max(s.sent_s[-1] for s in sent) - min(s.arrived_s for s in sent)
    return {
        "ttft_ms": 1e3 * float(np.mean([s.sent_s[0] - s.arrived_s for s in sent])),
        "itl_ms": 1e3 * float(np.mean(itl_s)),
        "tokens_per_s": sum(tokens) / span_s,
    }


def compared(name: str, rounds: Sequence[tuple[Measured, Measured]]) -> tuple[dict[str, float], list[str]]:
    """Figures of one load, ours and theirs of each round; and what is wrong. Nothing is judged where ours is not
    certified in every round."""
    pair = {tool: [r[i] for r in rounds] for i, tool in enumerate(TOOLS)}
    certified = all(one.valid is True for one in pair["ours"])
    figures, wrong = {f"{name}_certified": float(certified)}, []
    for metric in METRICS:
        means = {tool: _mean([one.told[metric] for one in runs]) for tool, runs in pair.items()}
        off = {tool: _mean([one.told[metric] / one.truth[metric] for one in runs]) - 1 for tool, runs in pair.items()}
        apart = means["theirs"] / means["ours"] - 1
        for tool in TOOLS:
            figures |= {f"{name}_{metric}_{tool}": means[tool], f"{name}_{metric}_{tool}_off_percent": 100 * off[tool]}
        figures[f"{name}_{metric}_apart_percent"] = 100 * apart
        if certified and abs(apart) > AGREE and abs(off["ours"]) > TRUE:
            wrong.append(f"{name} {metric}: {100 * apart:+.1f} % apart, ours {100 * off['ours']:+.1f} % off the server")
    for stage in STAGES:
        values = [one.stages[stage] for one in pair["theirs"] if stage in one.stages]
        figures |= {f"{name}_theirs_{stage}_ms": float(np.mean(values))} if values else {}
    return figures, wrong


def _mean(values: Sequence[float]) -> float:
    """Geometric: ratios."""
    return math.exp(float(np.log(values).mean()))


def main() -> int:
    python = environment(BUILD / "clients" / "aiperf", CLIENTS["aiperf"].packages)
    figures: dict[str, float] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(dir=BUILD) as kept:
        for ttft_ms in TTFT_MS:
            for load in LOADS:
                rounds = []
                for i in range(ROUNDS):
                    found = {}
                    for tool in list(TOOLS)[:: 1 if i % 2 == 0 else -1]:
                        folder = Path(kept) / f"{ttft_ms}-{load[0]}-{i}-{tool}"
                        found[tool] = measured(tool, ttft_ms, load, folder, python.parent)
                    rounds.append((found["ours"], found["theirs"]))
                told, faults = compared(f"ttft{ttft_ms}_streams{load[0]}", rounds)
                print(json.dumps(told), flush=True)
                figures |= told
                wrong += faults
        wrong += _unread(python, Path(kept))
    certified = sum(value for name, value in figures.items() if name.endswith("_certified"))
    if not certified:
        wrong.append("our client was certified at no load: the machine is not idle")
    for said in wrong:
        print(said, file=sys.stderr, flush=True)
    print(json.dumps({"loads_certified": certified, **{name: round(value, 3) for name, value in figures.items()}}))
    return 1 if wrong else 0


def _unread(python: Path, kept: Path) -> list[str]:
    """Whether AIPerf's models take our files, of the last round."""
    theirs_json = next(kept.glob("*-theirs/**/profile_export_aiperf.json"))
    ours_json = next(kept.glob("*-ours/profile_export_aiperf.json"))
    command = [str(python), str(Path(__file__).with_name("reads.py")), str(ours_json.parent), str(theirs_json.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    return [f"AIPerf does not read our files: {done.stderr[-800:]}"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
