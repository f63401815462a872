"""The real model beside others, one block for each kind of processor that was met: tables, ratios, labels."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.goals import ROUNDS, no_worse
from benchmarks.runs import (
    REAL,
    Result,
    Speed,
    file_of,
    host,
    kl_class,
    kl_from,
    left_out,
    numbers_of,
    of_kind,
    own_kl,
    remarks,
    speeds,
)
from benchmarks.tables import SHOWN, kl, megabytes, table

_ISAS = {"amx": "AMX", "avx512": "AVX-512", "avx2": "AVX2"}
_FLAGS = {
    "avx_vnni": "AVX_VNNI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8",
}  # fmt: skip
# Ours beside a peer's: in the same numbers, then in whichever of its formats is fastest and no worse. Peers with a
# scheduler and a sampler of their own stand beside ours with them.
SAME = (
    ("millrace", "llama.cpp"), ("millrace-bf16", "llama.cpp-bf16"), ("millrace-generate", "openvino-genai"),
    ("millrace-bf16-generate", "vllm-bf16"),
)  # fmt: skip
BEST = (
    ("millrace", "llama.cpp"), ("millrace-bf16", "llama.cpp"), ("millrace-generate", "openvino-genai"),
    ("millrace-bf16-generate", "openvino-genai"), ("millrace-generate", "vllm"), ("millrace-bf16-generate", "vllm"),
)  # fmt: skip
# Of the README: in the numbers of the file, each peer in whichever format is fastest and no worse.
HEADLINE = (("millrace", "llama.cpp"), ("millrace-generate", "openvino-genai"), ("millrace-generate", "vllm"))


@dataclass(frozen=True, slots=True)
class Block:
    """Of one run: its kind of processor, and its tables with what they are from."""

    title: str
    text: str
    run: Result


def processor(result: Result) -> str:
    """Kinds are told apart by the family and model, else by the name; and by the instruction sets that were used."""
    machine = result["machine"]
    name = machine["cpu"].replace(" Processor", "")
    number = f", family.model {machine['cpu_number']}" if machine.get("cpu_number") else ""
    isa = _ISAS.get(result.get("isa", ""), result.get("isa", ""))
    if result.get("hidden"):
        return f"{name}{number}: wider instruction sets than {isa} hidden"
    flags = [told for flag, told in _FLAGS.items() if flag in result.get("flags", ())]
    sets = ", ".join(filter(None, (isa, *flags)))
    return f"{name}{number}" + (f": {sets}" if sets else "")


def runs_by_processor() -> list[Result]:
    """The newest run of the real model on each kind with rounds enough; where no run has, the newest. Newest first."""
    found: dict[str, Result] = {}
    for _, result in of_kind("peers"):
        if result["shape"] == REAL:
            kind = processor(result)
            if decides(result) or kind not in found or not decides(found[kind]):
                found.pop(kind, None)
                found[kind] = result
    return [*reversed(found.values())]


def decides(result: Result) -> bool:
    return int(result.get("rounds", 1)) >= ROUNDS


def blocks() -> Iterator[Block]:
    for result in runs_by_processor():
        yield Block(processor(result), speed_table(result), result)


def by_engine(result: Result) -> dict[str, dict[str, Speed]]:
    found: dict[str, dict[str, Speed]] = {}
    for speed in speeds(result):
        found.setdefault(speed.engine, {})[speed.workload] = speed
    return found


def speed_table(result: Result) -> str:
    """Speeds and ratios of one run, with its label and its files."""
    parts = [*speeds_beside_kl(result)]
    if beside := ratios(result):
        names = ("Millrace beside", *SHOWN.values())
        parts.append(f"Times as fast, the median of ratios within a round:\n\n{table(names, beside)}")
    return "\n\n".join([*parts, *builds(result), sources(result)])


def speeds_beside_kl(result: Result) -> Iterator[str]:
    """A table with a row for each engine, and its label."""
    rows, engines = [], by_engine(result)
    timed = any("ready_s" in e for e in result["engines"].values())
    for engine, cells in engines.items():
        first = next(iter(cells.values()))
        rates = [f"{cells[w].median:,.0f}" if w in cells else "" for w in SHOWN]
        numbers, size = first.numbers, megabytes(cells.values())
        head = "; ".join(filter(None, (numbers.head, numbers.attention)))
        price = kl(engine, numbers, first.own_kl)
        ready = result["engines"][engine].get("ready_s")
        rows.append(
            [engine, numbers.weights, size, numbers.activations, head, price, *rates]
            + ([] if not timed else ["" if ready is None else f"{ready:,.1f}"])
        )
    header = ("", "weights", "MB", "activations", "head", "KL", *(f"{name}, tok/s" for name in SHOWN.values()))
    versions = ", ".join(sorted({f"{name.split('-')[0]} {e['version']}" for name, e in result["engines"].items()}))
    yield table((*header, "ready, s") if timed else header, rows)
    yield f"SmolLM2-135M-Instruct, its Q4_1 file; {host(result)}; {measured(result)}; {versions}."


def builds(result: Result) -> list[str]:
    """Sentences: how peers were built, and which were left out, with the reason."""
    return [f"{remark}." for remark in remarks(result)] + [f"Left out: {line}." for line in left_out(result)]


def sources(result: Result) -> str:
    """The files of its speeds and KL."""
    own = f"KL on {result['text']}." if result.get("text") else kl_from(speeds(result))
    return f"Speeds from {file_of(result)}. {own}".rstrip()


def measured(result: Result) -> str:
    """The day, the commit and the rounds."""
    rounds = int(result.get("rounds", 1))
    few = "" if decides(result) else f", fewer than the {ROUNDS} that decide"
    medians = f"medians of {rounds} round{'s' if rounds > 1 else ''}{few}"
    return f"{result['date']}, commit {result['commit']}; {medians}"


def ratios(result: Result) -> list[list[str]]:
    """Rows: what stands beside what, and how many times as fast ours is by workload."""
    if not all("round" in s for s in result["samples"]):
        return []
    rows = []
    for ours, peer in SAME:
        cells = [_ratio(result, ours, peer, w) for w in SHOWN]
        if any(cells):
            same = "numbers" if "bf16" in ours else "file"
            rows.append([f"{ours} to {peer}, the same {same}", *_shown(cells)])
    for ours, family in BEST:
        best, cells = _to_fastest(result, ours, family)
        if any(cells) and len(_formats(result, family)) > 1:
            named = [f"{cell} ({peer})" if cell else "" for cell, peer in zip(_shown(cells), best, strict=True)]
            rows.append([f"{ours} to the fastest format of {family} whose KL is no worse", *named])
    return rows


def headline(result: Result) -> list[list[str]]:
    """Rows of the README: a peer, Millrace's KL and the peer's, and how many times as fast Millrace is by workload."""
    if not all("round" in s for s in result["samples"]):
        return []
    same = [_ratio(result, "millrace", "llama.cpp", w) for w in SHOWN]
    rows = [["llama.cpp, the same file", _prices(result, "millrace", "llama.cpp"), *_shown(same)]] if any(same) else []
    for ours, family in HEADLINE:
        best, cells = _to_fastest(result, ours, family)
        if any(cells) and len(_formats(result, family)) > 1:  # of one format alone nothing is the fastest
            formats = dict.fromkeys(peer for peer in best if peer is not None)
            prices = ", ".join(_prices(result, ours, peer) for peer in formats)
            rows.append([f"{', '.join(formats)}: its fastest whose KL is no worse", prices, *_shown(cells)])
    return rows


def _to_fastest(result: Result, ours: str, family: str) -> tuple[list[str | None], list[float | None]]:
    """By workload: the peer's fastest format whose KL is no worse, and how many times as fast ours is."""
    best = [_fastest(result, ours, family, w) for w in SHOWN]
    return best, [None if peer is None else _ratio(result, ours, peer, w) for peer, w in zip(best, SHOWN, strict=True)]


def _prices(result: Result, ours: str, peer: str) -> str:
    """KL of ours and of the peer's."""
    found = [_price(result, engine) for engine in (ours, peer)]
    return " / ".join("not measured" if price is None else f"{price:.2g}" for price in found)


def _shown(cells: Sequence[float | None]) -> list[str]:
    return ["" if cell is None else f"{cell:.2f}" for cell in cells]


def _ratio(result: Result, ours: str, peer: str, workload: str) -> float | None:
    """The median over rounds; None: one of both did not run."""
    taken = {
        engine: {
            s["round"]: s["seconds"] for s in result["samples"] if (s["engine"], s["workload"]) == (engine, workload)
        }
        for engine in (ours, peer)
    }
    pairs = [taken[peer][at] / seconds for at, seconds in taken[ours].items() if at in taken[peer]]
    return statistics.median(pairs) if pairs else None


def _fastest(result: Result, ours: str, family: str, workload: str) -> str | None:
    """Of a peer's formats whose answers are no further from float32 than ours. None: there is none, or none is known"""
    bound = _price(result, ours)
    if bound is None:
        return None
    taken: dict[str, float] = {}
    for engine in _formats(result, family):
        price = _price(result, engine)
        if price is not None and no_worse(price, bound):
            found = [s["seconds"] for s in result["samples"] if (s["engine"], s["workload"]) == (engine, workload)]
            if found:
                taken[engine] = statistics.median(found)
    return min(taken, key=taken.__getitem__) if taken else None


def _formats(result: Result, family: str) -> list[str]:
    """A peer's engines in a run, one for each format of its weights."""
    return [engine for engine in result["engines"] if engine == family or engine.startswith(f"{family}-")]


def _price(result: Result, engine: str) -> float | None:
    described = result["engines"].get(engine)
    if described is None:
        return None
    own = own_kl(described)
    return kl_class(engine, numbers_of(engine, described)) if own is None else own
