"""docs/performance.md, from all result files: `python -m benchmarks.page`.

Every run of a claim is shown with its spread, not the best one; `benchmarks.verdicts` judges the figures.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import compression, scores
from benchmarks.page_rows import other_rows
from benchmarks.processors import blocks
from benchmarks.runs import (
    Numbers,
    Result,
    Speed,
    file_of,
    host,
    kind,
    kl_from,
    label,
    left_out,
    of_kind,
    remarks,
    results,
    speeds,
)
from benchmarks.tables import SHOWN, kl, megabytes, table
from benchmarks.verdicts import goals_of, is_later
from millrace.compress.presets import SAMPLES

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_ORDER = ("prefill-512", "prefill-4096", "decode-1", "decode-4", "decode-16")
_HEAD = """# Performance

Written by `python -m benchmarks.page` from the files in `benchmarks/results/`; do not edit. Every run of a claim is
here, each with its median, in brackets its slowest and fastest sample, and the name of its file. MB: of the engine's
weights. Runs on different machines, or on one machine at different times, are not to be compared: shared machines
change their memory's speed by half within minutes. What was measured side by side stands in one run. A + behind a
commit: the tree had changes that were not committed.

**Weights / activations / head** name the numbers in which an engine computes. KL is the mean divergence to float32 in
nats per token on a real model, SmolLM2-135M-Instruct (its Q4_1 file, dequantised, is the float32), for the same
numbers; of another engine, else with its weights made in the same way (`--peers`): rows of 576 there do not divide by
128 or 256, so that OpenVINO has groups of 64 and llama.cpp's K types are Q5_0 and the like. Where it is empty it was
not measured. A speed without it says nothing of the answers."""


def page() -> str:
    parts = [
        _HEAD,
        *_accuracy(),
        *_compressions(),
        *_speeds(),
        *_processors(),
        *_goals(),
        *_others(),
        *_engines(),
        *_left_out(),
    ]
    return "\n\n".join(parts) + "\n"


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
            speed = "; ".join(f"{s} in {names[_run(s.run)]}" for s in runs)
            rows.append([workload, engine, str(numbers), megabytes(runs), kl(engine, numbers, _own_kl(runs)), speed])
        legend = "\n".join(f"{i}. {name}" for name, i in names.items())
        header = ("workload", "engine", "weights / activations / head", "MB", "KL", "median (slowest-fastest) in run")
        told = [f"### {subject}", table(header, rows), "Runs:", legend, kl_from(mine)]
        yield "\n\n".join(filter(None, told))


def _run(result: Result) -> str:
    if kind(result) == "alone":
        return f"alone: {label(result)}"
    return "; ".join(
        [f"beside others: {label(result)}", *remarks(result), *(f"left out: {e}" for e in left_out(result))]
    )


def _claims(found: Sequence[Speed]) -> Iterator[tuple[tuple[str, str, Numbers], list[Speed]]]:
    def place(s: Speed) -> tuple[int, str, str]:
        return (_ORDER.index(s.workload) if s.workload in _ORDER else len(_ORDER), s.engine, str(s.numbers))

    for _, runs in groupby(sorted(found, key=place), key=place):
        same = list(runs)
        yield (same[0].workload, same[0].engine, same[0].numbers), same


def _own_kl(runs: Sequence[Speed]) -> float | None:
    """Of the newest run that measured it."""
    return next((s.own_kl for s in reversed(runs) if s.own_kl is not None), None)


def _processors() -> Iterator[str]:
    yield (
        "## By processor\n\nOf SmolLM2-135M-Instruct, the newest run on each kind of processor; figures of fewer than"
        " five rounds say so. Wider instruction sets hidden: from all engines, as on a processor that has none."
    )
    for block in blocks():
        yield f"### {block.title}\n\n{block.text}"


def _goals() -> Iterator[str]:
    rows = []
    for name, result in results():
        impossible = _above_one(result)
        for g in goals_of(result):
            reached = "" if g["reached"] is None else _figure(g["reached"])
            reached += " ({} to {})".format(*map(_figure, g["interval"])) if "interval" in g else ""
            bound = f"at most {g['goal']}" if g.get("at_most") else str(g["goal"])
            verdict = g["verdict"] + (", judged later" if is_later(result) else "")
            if impossible and _of_bandwidth(g):
                verdict = "no measurement: a share of this run is above 1"
            shape = next(
                (result[key] for key in ("shape", "beside", "model") if result.get(key)), name.partition("-")[0]
            )
            rows.append([f"{shape}: {g['what']}{_extrapolated(result)}", reached, bound, verdict, f"`{name}`"])
    yield (
        "## Goals\n\nJudged by today's rules, whatever the rules were when the figures were measured. A speed beside a"
        " peer counts only if the engine's KL is no worse than the peer's, at two significant digits. The median of at"
        " least five rounds decides, of all rounds of a run. If parts are left out of a fit in turn, the worst part"
        " decides. A goal that names a method is met by that method alone. *Judged later*: the file is older than its"
        " goals. If one share of the bandwidth is above 1, no share of that run counts."
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


def _others() -> Iterator[str]:
    yield (
        "## Embeddings, contexts, starts, server, tensor models, sampling, masks, statistics, MMLU, products, rounding,"
        " versions, kernels for GPUs"
    )
    yield table(("what", "figure", "run"), other_rows())


def _engines() -> Iterator[str]:
    """Versions, commits and build flags; what was tried before they were set up so."""
    rows: dict[tuple[str, ...], None] = {}
    tried: list[tuple[str, ...]] = []
    for _, result in of_kind("peers"):
        run = f"{result['date']}, {host(result)}, {file_of(result)}"
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
