"""Embeddings of texts of mixed lengths, beside ONNX Runtime and OpenVINO: tokens a second, and how far from the truth.

    python -m benchmarks.embeddings ../all-MiniLM-L6-v2

The model's folder is one of sentence-transformers. Texts are random ids, of 8 to 256 tokens; a token counts that is
one, and no padding. Each engine has a process of its own, which sleeps while another is measured; they take turns, and
who begins changes from round to round. The distance is the largest of any element from transformers in float32, each
text alone. Needs the packages of the extra `peers`. Writes
results/embeddings-MODEL-TIME-COMMIT.json.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.embedders import EMBEDDERS, SearchWindows, Vectors, load
from benchmarks.record import count, judged, provenance, write_result
from millrace.engine.roofline_probe import peak_rates
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import load as machine_load
from millrace.machine.cpu import usable_cores

SHORTEST, LONGEST = 8, 256  # tokens of a text
SETTLE_S = 0.05  # until an engine's threads have stopped spinning
PACKAGES = {"onnxruntime": ("onnx", "onnxruntime", "torch"), "openvino": ("openvino", "torch"), "millrace": ()}
MILESTONE, GOAL = 0.9, 1.1
RIVALS = {"fp32": ("onnxruntime-fp32", "openvino-fp32"), "bf16": ("openvino-bf16",)}


def random_texts(n: int, vocab_size: int, seed: int = 0) -> SearchWindows:
    """Lengths as likely as each other; special ids at both ends as BERT has them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SHORTEST, LONGEST + 1, n)
    return [[101, *rng.integers(1000, vocab_size, k - 2).tolist(), 102] for k in lengths]


def work(name: str, checkpoint: Path, folder: Path, threads: int, asked: Connection) -> None:
    """An engine's process: the texts come first, then a word for each thing to do."""
    engine = load(name, checkpoint, folder, threads)
    engine.warm_up(asked.recv())
    asked.send("ready")
    while (word := asked.recv()) != "end":
        if word == "describe":
            asked.send(engine.describe())
            continue
        started = time.perf_counter()
        vectors = engine.run()
        taken_s = time.perf_counter() - started
        time.sleep(SETTLE_S)
        asked.send((taken_s, vectors))


class Worker:
    def __init__(self, name: str, checkpoint: Path, folder: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(name, checkpoint, folder, threads, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, word: object) -> Any:
        """raises EOFError where its process has ended; its own output says why"""
        self._pipe.send(word)
        return self._pipe.recv()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        self._process.join()


def missing(name: str) -> list[str]:
    return [package for package in PACKAGES[name.partition("-")[0]] if find_spec(package) is None]


def race(checkpoint: Path, texts: SearchWindows, names: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of each round by engine, with each one's distance and settings, and the machine beside them."""
    samples: dict[str, list[float]] = {}
    engines: dict[str, dict[str, Any]] = {}
    left_out = {name: f"lacking: {', '.join(m)}" for name in names if (m := missing(name))}
    loads, peaks = [], []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        exact = truth(checkpoint, texts)
        workers = {}
        for name in (n for n in names if n not in left_out):
            print(f"loading and warming up, {name}", flush=True)
            workers[name] = stack.enter_context(Worker(name, checkpoint, folder, threads))
            workers[name].ask(texts)
        for at in range(rounds):
            loads.append(round(machine_load(), 2))
            peaks.append(statistics.median(peak_rates(usable_isas()[0], "fp32", threads)))
            order = list(workers)
            for name in order[at % len(order) :] + order[: at % len(order)]:
                taken_s, vectors = workers[name].ask("run")
                samples.setdefault(name, []).append(taken_s)
                distance = float(np.abs(vectors - exact).max())
                engines.setdefault(name, {"distance": distance})["distance"] = distance
                print(f"round {at + 1} of {rounds}, {name}: {taken_s:.3f} s", flush=True)
        for name, worker in workers.items():
            engines[name] |= worker.ask("describe")
    return {"samples_s": samples, "engines": engines, "left_out": left_out, "load": loads, "fp32_peak_per_s": peaks}


def truth(checkpoint: Path, texts: SearchWindows) -> Vectors:
    """Each text alone, in transformers."""
    from benchmarks.embedders import open_transformers

    model = open_transformers(checkpoint, checkpoint, "fp32", usable_cores())
    alone = [(np.array([ids]), np.ones((1, len(ids)), np.int64)) for ids in texts]
    found = [rows[0] for rows in model.vectors("sdpa", alone)]
    return np.stack(found)


def goals(samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """To the fastest of the others in the same numbers: the median over rounds of the ratio within a round."""
    found = []
    for precision, rivals in RIVALS.items():
        ours = samples.get(f"millrace-{precision}")
        theirs = {name: samples[name] for name in rivals if name in samples}
        if not ours or not theirs:
            continue
        best = min(theirs, key=lambda name: statistics.median(theirs[name]))
        ratio = statistics.median(t / o for t, o in zip(theirs[best], ours, strict=True))
        what = f"embeddings of mixed lengths: millrace-{precision} to {' or '.join(rivals)}"
        found.append({**judged(what, ratio, GOAL, MILESTONE), "against": best})
    return found


def run(checkpoint: Path, n_texts: int, names: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    texts = random_texts(n_texts, vocab_size)
    found = race(checkpoint, texts, names, rounds, threads)
    n_tokens = sum(map(len, texts))
    for name, engine in found["engines"].items():
        rates = sorted(n_tokens / s for s in found["samples_s"][name])
        engine["tokens_per_s"] = {"median": statistics.median(rates), "low": rates[0], "high": rates[-1]}
    return {
        **provenance("benchmarks.embeddings"), "shape": checkpoint.resolve().name, "texts": n_texts,
        "tokens": n_tokens, "lengths": [SHORTEST, LONGEST], "threads": threads, "rounds": rounds, **found,
        "goals": goals(found["samples_s"]),
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['shape']}: {result['texts']} texts, {result['tokens']:,} tokens, {result['threads']} threads"]
    for name, e in result["engines"].items():
        speed = e["tokens_per_s"]
        lines.append(
            f"  {name:18} {speed['median']:9,.0f} tokens/s ({speed['low']:,.0f}-{speed['high']:,.0f}), "
            f"{e['distance']:.1e} from transformers"
        )
    lines += [f"  {g['what']}: {g['reached']} ({g['verdict']})" for g in result["goals"]]
    return "\n".join([*lines, *(f"  left out: {name}: {why}" for name, why in result["left_out"].items())])


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embeddings", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", type=Path, help="the folder of an encoder of sentences")
    parser.add_argument("--texts", type=count, default=256, help="default: %(default)s")
    parser.add_argument("--rounds", type=count, default=7, help="default: %(default)s")
    parser.add_argument("--threads", type=count, default=usable_cores(), help="default: all cores")
    parser.add_argument("--engines", nargs="+", choices=EMBEDDERS, default=[*EMBEDDERS])
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    args = parser.parse_args()
    result = run(args.model, args.texts, args.engines, args.rounds, args.threads)
    path = write_result(f"embeddings-{result['shape']}", result)
    print(json.dumps(result) if args.json else f"{table(result)}\n{path}")


if __name__ == "__main__":
    main()
