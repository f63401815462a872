"""The README's tables, from the newest result file of each shape and precision: `python -m benchmarks.readme`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks: written by python -m benchmarks.readme -->", "<!-- end of benchmarks -->"


def newest() -> list[dict[str, Any]]:
    """One result for each shape and precision; file names begin with the date."""
    found = {}
    for path in sorted(RESULTS.glob("[0-9]*.json")):
        result = json.loads(path.read_text())
        found[result["shape"], result["precision"]] = result
    return sorted(found.values(), key=lambda r: (-r["weights_bytes"], r["precision"]))


def table() -> str:
    lines = [
        "| shape (random weights) | precision | prefill of 512, tok/s | decode, tok/s in all, for 1 / 4 / 16 sequences"
        " | of the read bandwidth, 1 sequence | load and first step |",
        "|---|---|---|---|---|---|",
    ]
    for r in newest():
        p, decode = r["prefill"], r["decode"]
        peak = f" ({p['share_of_peak']:.0%} of the instructions' peak)" if p["share_of_peak"] else ""
        rates = " / ".join(f"{d['tokens_per_s']:,.0f}" for d in decode)
        lines.append(
            f"| {r['shape']} | {r['precision']}, head {r['head']} | {p['tokens_per_s']:,.0f}{peak} | {rates} "
            f"| {decode[0]['share_of_bandwidth']:.0%} | {r['load_s']:.2f} s |"
        )
    machines = sorted({f"{r['machine']['cores']} cores of {r['machine']['cpu']}, {r['isa']}" for r in newest()})
    dates = sorted({r["date"] for r in newest()})
    return "\n".join(
        [*lines, "", f"{'; '.join(machines)}; {', '.join(dates)}; medians, every sample in `benchmarks/results/`."]
    )


def peers() -> str:
    """A table for each shape that was measured beside other engines; each is one run."""
    newest_run = {}
    for path in sorted(RESULTS.glob("peers-*.json")):
        result = json.loads(path.read_text())
        newest_run[path.name.replace(result["date"], "")] = (path.name, result)
    return "\n\n".join(_peers_table(name, result) for name, result in newest_run.values())


def _peers_table(file: str, result: dict[str, Any]) -> str:
    cells = {(e["engine"], e["workload"]): e for e in result["summary"]}
    workloads = list(result["workloads"])
    lines = [f"| {result['shape']}, tok/s | {' | '.join(workloads)} |", "|---" * (len(workloads) + 1) + "|"]
    for engine in result["engines"]:
        found = (cells.get((engine, w)) for w in workloads)
        lines.append(f"| {engine} | " + " | ".join(f"{c['tokens_per_s']:,.0f}" if c else "" for c in found) + " |")
    versions = ", ".join(sorted({f"{name.split('-')[0]} {e['version']}" for name, e in result["engines"].items()}))
    machine = f"{result['machine']['cores']} cores of {result['machine']['cpu']}"
    return "\n".join([*lines, "", f"{machine}; {result['date']}; {versions}; goals and samples: `{file}`."])


def written(readme: str) -> str:
    """The README with the tables of today's results between its marks."""
    before, rest = readme.split(BEGIN)
    tables = "\n\n".join(filter(None, [table(), peers()]))
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(written(path.read_text()))
