"""docs/performance.md, from all result files: `python -m benchmarks.page`.

Every run of a claim is shown with its spread, not the best one; verdicts are those that the result files hold.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import compression, contexts, scores, start
from benchmarks.runs import (
    Numbers,
    Result,
    Speed,
    host,
    kind,
    kl_class,
    label,
    left_out,
    of_kind,
    remarks,
    results,
    speeds,
)
from millrace.compress.collect import SAMPLES

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SHOWN = {"prefill-512": "prompt of 512", "decode-1": "1 user", "decode-16": "16 users"}
_ORDER = ("prefill-512", "prefill-4096", "decode-1", "decode-4", "decode-16")

_HEAD = """# Performance

Written by `python -m benchmarks.page` from the files in `benchmarks/results/`; do not edit. Every run of a claim is
here, each with its median and, in brackets, its slowest and fastest sample. MB: of the engine's weights. Runs on
different machines, or on one machine at different times, are not to be compared: shared machines change their memory's
speed by half within minutes. What was measured side by side stands in one run. A + behind a commit: the tree had
changes that were not committed.

**Weights / activations / head** name the numbers in which an engine computes. KL is the mean divergence to float32 in
nats per token on a real model, SmolLM2-135M-Instruct (its Q4_1 file, dequantised, is the float32), for the same
numbers; of another engine, else with its weights made in the same way (`--peers`): rows of 576 there do not divide by
128 or 256, so that OpenVINO has groups of 64 and llama.cpp's K types are Q5_0 and the like. Where it is empty it was
not measured. A speed without it says nothing of the answers."""


def page() -> str:
    parts = [_HEAD, *_accuracy(), *_compressions(), *_speeds(), *_goals(), *_others(), *_engines(), *_left_out()]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _accuracy() -> Iterator[str]:
    yield (
        "## What each precision costs\n\n`python -m benchmarks.perplexity`; a table's first row is its reference."
        " Speeds beside the price: all engines of a table in one process, in turns, the median and in brackets the"
        " slowest and fastest of five samples."
    )
    for _, result in of_kind("perplexity"):
        yield f"### {result['model']}\n\n{result['tokens']:,} tokens, {result['text']}; {label(result)}"
        yield _scores(result["scores"])
        if result["heads"]:
            yield "A body under each head, beside a head in float32:"
            yield _scores(result["heads"])
        for other in result.get("more", ()):
            yield f"{other['about'].capitalize()}, {other['text']}, {other['tokens']:,} tokens:"
            yield _scores(other["scores"])


def _scores(scores: Sequence[Result]) -> str:
    numbers = ("weights", "activations", "head", "kv", "attention")
    timed = [f"{name}, tok/s" for name in SHOWN.values()] if any("speed" in s for s in scores) else []
    rows = [
        [
            s["precision"], " / ".join(s[k] for k in numbers if s.get(k)), f"{s['perplexity']:.3f}",
            f"{s['ratio'] - 1:+.2%}", f"{s['mean_kl']:.2g}", f"{s['agreement']:.1%}", *(_paces(s) if timed else ()),
        ]
        for s in scores
    ]  # fmt: skip
    header = ("engine", "weights / activations / head / KV", "perplexity", "", "KL", "same likeliest token", *timed)
    return table(header, rows)


def _paces(score: Result) -> Iterator[str]:
    """Tokens a second with the slowest and the fastest sample; empty where the engine was not timed."""
    for name in SHOWN:
        found = score.get("speed", {}).get(name)
        yield "" if found is None else f"{found['tokens_per_s']:,.0f}{_spread(found)}"


def _spread(speed: Result) -> str:
    """Of the samples, in tokens a second."""
    seconds = speed["samples_s"]
    tokens = speed["tokens_per_s"] * statistics.median(seconds)
    return f" ({tokens / max(seconds):,.0f}-{tokens / min(seconds):,.0f})"


def _compressions() -> Iterator[str]:
    yield (
        "## What compressing costs\n\n`python -m benchmarks.compression`: each recipe becomes a folder, which is"
        " measured beside its source in float32; intervals of 95 %, over windows. Made in: with statistics at hand."
    )
    for _, result in of_kind("compression"):
        yield f"### {result['model']}\n\n{compression.about(result)}; {label(result)}"
        yield table(*compression.losses(result))
    for _, result in of_kind("scores"):
        yield f"### {result['model']}: right answers\n\n{scores.about(result)}; {label(result)}"
        yield table(*scores.scores(result))


def _speeds() -> Iterator[str]:
    """One table for each model or shape; a row is a claim, and has all of its runs, beside others and alone."""
    yield (
        "## Speed\n\n`python -m benchmarks.peers`: the same weights, in turns, each engine at its best settings;"
        " `python -m benchmarks`: Millrace by itself. Shapes have random weights. Tokens a second."
    )
    found = [s for name in ("peers", "alone") for _, result in of_kind(name) for s in speeds(result)]
    for subject, of_subject in groupby(sorted(found, key=lambda s: s.subject), key=lambda s: s.subject):
        mine = list(of_subject)
        names = {name: i + 1 for i, name in enumerate(dict.fromkeys(_run(s.run) for s in mine))}
        rows = []
        for (workload, engine, numbers), runs in _claims(mine):
            told = "; ".join(f"{s} in {names[_run(s.run)]}" for s in runs)
            rows.append([workload, engine, str(numbers), megabytes(runs), kl(engine, numbers), told])
        legend = "\n".join(f"{i}. {name}" for name, i in names.items())
        header = ("workload", "engine", "weights / activations / head", "MB", "KL", "median (slowest-fastest) in run")
        yield f"### {subject}\n\n{table(header, rows)}\n\nRuns:\n\n{legend}"


def _run(result: Result) -> str:
    if kind(result) == "alone":
        return f"alone: {label(result)}"
    return "; ".join(
        [f"beside others: {label(result)}", *remarks(result), *(f"left out: {e}" for e in left_out(result))]
    )


def megabytes(of: Iterable[Speed]) -> str:
    """Of an engine's weights, as each run told it; empty where none did."""
    told = sorted({round(s.weights_bytes / 1e6) for s in of if s.weights_bytes is not None})
    return "-".join(f"{size:,}" for size in dict.fromkeys([told[0], told[-1]])) if told else ""


def _claims(found: Sequence[Speed]) -> Iterator[tuple[tuple[str, str, Numbers], list[Speed]]]:
    def place(s: Speed) -> tuple[int, str, str]:
        return (_ORDER.index(s.workload) if s.workload in _ORDER else len(_ORDER), s.engine, str(s.numbers))

    for _, runs in groupby(sorted(found, key=place), key=place):
        same = list(runs)
        yield (same[0].workload, same[0].engine, same[0].numbers), same


def kl(engine: str, numbers: Numbers) -> str:
    """On the real model."""
    found = kl_class(engine, numbers)
    return "" if found is None else f"{found:.2g}"


def _goals() -> Iterator[str]:
    rows = []
    for name, result in results():
        found = [result["goal"]] if "goal" in result else result.get("goals")
        goals = _judged_now(result) if found is None else found
        impossible = _above_one(result)
        for g in goals:
            reached = "" if g["reached"] is None else _figure(g["reached"])
            reached += " ({} to {})".format(*map(_figure, g["interval"])) if "interval" in g else ""
            bound = f"at most {g['goal']}" if g.get("at_most") else str(g["goal"])
            verdict = g["verdict"] + (", judged later" if found is None else "")
            if impossible and _of_bandwidth(g):
                verdict = "no measurement: a share of this run is above 1"
            shape = next(
                (result[key] for key in ("shape", "beside", "model") if result.get(key)), name.partition("-")[0]
            )
            rows.append([f"{shape}: {g['what']}{_extrapolated(result)}", reached, bound, verdict, f"`{name}`"])
    yield (
        "## Goals\n\nAs judged when they were measured; *judged later*: the file is older than its goals, which are"
        " held against it here. Where one share of the bandwidth is above 1, no share of that run counts."
    )
    yield table(("what", "reached", "goal", "verdict", "file"), [r for r in rows if r[3] != "not measured"])


def _figure(reached: float) -> str:
    """Two digits behind the point, and what is small by three that count: 0.0102 is not 0.01."""
    return f"{reached:.2f}" if abs(reached) >= 0.1 or not reached else f"{reached:#.3g}"


def _extrapolated(result: Result) -> str:
    """Of what a figure was scaled up from, where less was run than it speaks of; empty for all others."""
    if kind(result) != "calibration":
        return ""
    whole = result["share_of_layers"] == 1 and result["samples"] == SAMPLES
    parts = f"{result['share_of_layers']:.0%} of the layers and {result['samples']} samples"
    return "" if whole else f" (extrapolated from {parts})"


def _above_one(result: Result) -> bool:
    """Whether a decode of the run read more than there was to read with; files of today hold no such share."""
    decodes = (e for e in result.get("summary", ()) if e["workload"].startswith("decode"))
    return any((e["share_of_limit"] or 0) > 1 for e in decodes)


def _of_bandwidth(goal: Result) -> bool:
    return "share of the read bandwidth" in goal["what"]


def _judged_now(result: Result) -> list[Result]:
    """By today's goals, for files from before they were written with them."""
    if kind(result) == "contexts":
        return contexts.goals(result["decode"], result["mixed"], result["kv_cache_dtype"], result["shape"])
    if kind(result) == "start":
        return start.goals(
            result["precision"], result["build_s"], result["start_to_first_token_s"], result["resident_beyond_bytes"]
        )
    return []


def _others() -> Iterator[str]:
    yield (
        "## Embeddings, contexts, starts, server, tensor models, sampling, masks, statistics, MMLU, products, rounding,"
        " versions, kernels for GPUs"
    )
    header = ("what", "figure", "run")
    rows = [*_embeddings(), *_contexts(), *_starts(), *_serving(), *_sampling(), *_products(), *_hadamard()]
    rows += [*_tensors(), *_children(), *_batching(), *_routes(), *_grammars(), *_calibrations(), *_mmlu()]
    rows += [*_versions(), *_gpu_kernels(), *_gpu()]
    yield table(header, rows)


def _embeddings() -> Iterator[list[str]]:
    for _, r in of_kind("embeddings"):
        low, high = r["lengths"]
        for name, e in r["engines"].items():
            speed = e["tokens_per_s"]
            rate = f"{speed['median']:,.0f} ({speed['low']:,.0f}-{speed['high']:,.0f})"
            who = f"{r['shape']}, {name}: embeddings of {low} to {high} tokens, tok/s"
            yield [who, f"{rate}, at most {e['distance']:.0e} from transformers", label(r)]


def _versions() -> Iterator[list[str]]:
    for _, r in of_kind("versions"):
        for run in r["runs"]:
            for one in run["work"]:
                who = f"{run['shape']} {run['precision']}, {one['work']}: speed of this commit, of {r['old']}'s"
                tokens = "same tokens" if one["same_tokens"] else "OTHER TOKENS"
                figure = (
                    f"{one['speed_of_old']:.3f}; of itself in a second process {one['speed_of_itself']:.3f}; {tokens}"
                )
                yield [who, figure, label(r)]


def _contexts() -> Iterator[list[str]]:
    for _, r in of_kind("contexts"):
        d, m, who = r["decode"], r["mixed"], f"{r['shape']} {r['precision']}, KV {r['kv_cache_dtype']}"
        depths = ", ".join(f"{rate:,.0f} at {depth}" for depth, rate in d["tokens_per_s"].items())
        cold = f", both from memory {d['from_memory']['share']:.0%}" if "from_memory" in d else ""
        yield [f"{who}: decode by depth, tok/s", f"{depths}: {d['share']:.0%}{cold}", label(r)]
        yield [f"{who}: p99 of a stream's gaps beside a prompt, in medians", f"{m['p99_to_median_gap']:.2f}", label(r)]
        together = m["total_to_one_after_the_other"] - 1
        yield [f"{who}: both together, of one after the other", f"{together:+.0%}", label(r)]


def _starts() -> Iterator[list[str]]:
    for _, r in of_kind("start"):
        who = f"{r['shape']} {r['precision']}"
        for what, samples in (("build", r["builds_s"]), ("process start to first token", r["starts_s"])):
            middle = r["build_s"] if what == "build" else r["start_to_first_token_s"]
            spread = f"{middle:.2f} ({min(samples):.2f}-{max(samples):.2f})"
            yield [f"{who}: {what}, s", spread, label(r)]
        yield [f"{who}: beyond weights and KV, MiB", f"{r['resident_beyond_bytes'] / 2**20:.0f}", label(r)]


def _serving() -> Iterator[list[str]]:
    for _, r in of_kind("serving"):
        for load in r["loads"]:
            rates = f"{load['http_tokens_per_s']:,.0f} over HTTP, {load['in_process_tokens_per_s']:,.0f} in process"
            yield [
                f"{r['shape']} {r['precision']}: {load['users']} users, tok/s",
                f"{rates}: {load['cost']:.1%}",
                label(r),
            ]


def _tensors() -> Iterator[list[str]]:
    for _, r in of_kind("tensors"):
        for protocol in ("http", "http, an id each", "grpc"):  # the second since clients that number are measured
            for name, samples in r.get(protocol, {}).items():
                rates = [one["per_s"] for one in samples]
                user, system = (statistics.median(one[what] for one in samples) for what in ("user_us", "system_us"))
                figure = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
                who = f"{r['model']} over {protocol}, {name}: requests/s"
                yield [who, f"{figure}; CPU a request {user:.0f} us, in the kernel {system:.0f} us", label(r)]
        beyond = statistics.median(one["request_us"] - one["backend_us"] for one in r["in_process"])
        yield [f"{r['model']} in process: CPU a request beyond its arithmetic", f"{beyond:.1f} us", label(r)]


def _children() -> Iterator[list[str]]:
    for _, r in of_kind("tensors.child"):
        for n_bytes in sorted({sample["n_bytes"] for sample in r["samples"]}):
            times = [sample["child_us"] for sample in r["samples"] if sample["n_bytes"] == n_bytes]
            here = statistics.median(sample["here_us"] for sample in r["samples"] if sample["n_bytes"] == n_bytes)
            figure = f"{statistics.median(times):,.0f} ({min(times):,.0f}-{max(times):,.0f}); in process {here:,.0f}"
            yield [
                f"a tensor of {n_bytes:,} bytes to a model.py in a process of its own, and back: us",
                figure,
                label(r),
            ]


def _routes() -> Iterator[list[str]]:
    for _, r in of_kind("tensors.routes"):
        for load in r["loads"]:
            for name, samples in load["samples"].items():
                rates = [load["users"] * r["new"] / s["seconds"] for s in samples]
                cpu = statistics.median(s["server_cpu_s"] for s in samples)
                figure = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
                who = f"{r['model']}, {load['users']} users over {name}: tok/s"
                yield [who, f"{figure}; {cpu:.2f} s of the server's CPU", label(r)]


def _batching() -> Iterator[list[str]]:
    names = {"runtime_1": "ONNX Runtime, a line at a time", "runtime_16": "ONNX Runtime, 16 lines in one array",
             "ours_1": "a repository, 1 client", "ours_16": "a repository, 16 clients"}  # fmt: skip
    for _, r in of_kind("tensors.batching"):
        for way, who in names.items():
            rates = [sample[way] for sample in r["samples"]]
            quiet = statistics.median(rates[i] for i in r["quiet_rounds"])
            spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
            yield [f"{r['model']}, {who}: lines/s", f"{quiet:,.0f} in quiet rounds, {spread} in all", label(r)]
        sizes = sorted(r["batch_sizes"].items(), key=lambda one: -one[1])[:3]
        yield [f"{r['model']}, 16 clients: batches by size", ", ".join(f"{n} of {s}" for s, n in sizes), label(r)]


def _sampling() -> Iterator[list[str]]:
    for _, r in of_kind("alone"):
        shares = "; ".join(f"{s['asked']}: {s['sampling_s'] / s['step_s']:.1%}" for s in r["sampling"])
        rows = r["sampling"][0]["rows"]
        yield [f"{r['shape']} {r['precision']}: sampling of {rows} rows, of a step", shares, label(r)]


def _grammars() -> Iterator[list[str]]:
    for _, r in of_kind("grammars"):
        shares = f"{r['share_of_own_step']:.1%} of its own step" + (
            f", {r['share']:.1%} of one of {r['beside']}" if "share" in r else ""
        )
        yield [f"{r['rows']} masks of {r['rows']} grammars", f"{r['cost_s'] * 1e3:.2f} ms, {shares}", label(r)]


def _calibrations() -> Iterator[list[str]]:
    for _, r in of_kind("calibration"):
        whole = r["share_of_layers"] == 1 and r["samples"] == SAMPLES
        measured = "" if whole else f" (by {r['share_of_layers']:.0%} of its layers and {r['samples']} samples)"
        for precision, run in r["runs"].items():
            who = f"{r['model']} in {precision}: statistics of {SAMPLES} samples of {r['tokens_each']} tokens, s"
            figure = f"{run['seconds_of_all']:,.0f}{measured}, {run['peak_bytes'] / 2**30:.2f} GiB at most"
            yield [who, figure, label(r)]


def _mmlu() -> Iterator[list[str]]:
    for _, r in of_kind("mmlu"):
        for name, run in r["runs"].items():
            low, high = run["interval"]
            said = f"{run['seconds'] / 60:.1f}; {run['share']:.2%} right ({low:.1%} to {high:.1%})"
            if "against" in run:
                other = run["against"]
                said += (
                    f", {other['difference']:+.2%} beside {other['precision']}, {other['changed']:,} chose otherwise"
                )
            yield [f"{r['model']} in {name}: {run['questions']:,} questions of MMLU, minutes", said, label(r)]


def _products() -> Iterator[list[str]]:
    for _, r in of_kind("products"):
        who = f"{r['precision']} on {r['isa']}, {r['threads']} threads, {r['n']} x {r['k']}"
        rates = ", ".join(f"{p['operations_per_s'] / 1e9:,.0f} with {p['rows']}" for p in r["products"])
        yield [f"{who}: 10^9 operations/s by rows", rates, label(r)]


def _hadamard() -> Iterator[list[str]]:
    for _, r in of_kind("hadamard"):
        for p in r["prices"]:
            plain, *others = p["ways"]
            who = f"rounding and products of a layer of 1.1B, {p['weights']} on {p['isa']}, {p['rows']} rows"
            told = ", ".join(f"{w['name']} {w['ratio'] - 1:+.1%}" for w in others)
            figure = f"{plain['median_s'] * 1e3:.3f} ms with activations in {plain['name']}; {told}"
            yield [who, figure, label(r)]


def _gpu() -> Iterator[list[str]]:
    """Rows of a GPU's script; how many requests they count stands with them."""
    for _, r in of_kind("gpu"):
        figures = [f"{r[k]:,.1f} {unit}" for k, unit in (("tokens_per_s", "tokens/s"), ("ttft_ms", "ms")) if k in r]
        if "share_of_roofline" in r:
            figures.append(f"{r['share_of_roofline']:.0%} of what the device reads and multiplies")
        if "requests" in r:
            figures.append(f"{r['requests']:,} of {r['requests_of_the_table']:,} requests")
        if "ok" in r:
            figures.append("agrees" if r["ok"] else "does not agree")
        yield [f"{r['shape']} on {r['device']['name']}: {r['row']}", ", ".join(figures or [r["refused"]]), label(r)]


def _gpu_kernels() -> Iterator[list[str]]:
    for _, r in of_kind("gpu_kernels"):
        for k in r["kernels"]:
            name = f"{k['kernel']}, {k['about']}" if k["about"] else k["kernel"]
            told = f"{k['registers']} registers, {k['shared_bytes']:,} bytes shared, {k['spilled_bytes']} spilled"
            yield [f"GPU kernel, compiled alone: {name}, {k['architecture']}", told, label(r)]


def _engines() -> Iterator[str]:
    """Versions, commits and build flags; what was tried before they were set up so."""
    rows: dict[tuple[str, ...], None] = {}
    tried: list[tuple[str, ...]] = []
    for _, result in of_kind("peers"):
        run = f"{result['date']}, {host(result)}"
        for name, e in result["engines"].items():
            settings = {key: value for key, value in e["settings"].items() if key != "tried"}
            found = "not compared" if "correlation" not in e else f"{e['correlation']:.3f}"
            rows[(name, e["version"], _settings(settings), found, run)] = None
            tried += [(name, w, _tried(of), run) for w, of in e["settings"].get("tried", {}).items()]
    yield (
        "## Engines\n\nVersions, build flags and settings, as each told them in its run. Output: how its logits"
        " correlate with those of millrace-bf16 in the same run; below 0.5 an engine is left out."
    )
    yield table(("engine", "version", "settings", "output", "run"), sorted(map(list, rows)))
    if tried:
        yield "### What was tried\n\nSeconds of one sample in the warm-up, the best of two, the fastest first."
        yield table(("engine", "workload", "settings", "run"), sorted(map(list, tried)))


def _tried(settings: Sequence[Result]) -> str:
    told = (
        (s["seconds"], ", ".join(f"{k} {v}" for k, v in s.items() if k != "seconds" and v is not None))
        for s in settings
    )
    return "; ".join(f"{how}: {seconds:.3g}" for seconds, how in sorted(told))


def _left_out() -> Iterator[str]:
    rows = [[name, reason, label(r)] for _, r in of_kind("peers") for name, reason in r["left_out"].items()]
    yield "## Left out\n\nWhat was to run beside the others and could not."
    yield table(("engine", "why", "run"), rows)


def _settings(settings: Result) -> str:
    return "; ".join(f"{key}: {_plain(value)}" for key, value in settings.items()).replace("|", ",")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return str(value)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
