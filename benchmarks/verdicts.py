"""Verdicts on the goals of result files, by today's rules.

A result file keeps the verdict of the day on which it was written. Pages judge its figures again: see
`benchmarks.peers.goals` for speeds beside a peer. Time decides as the median of at least five rounds, of all of a run.
"""

from collections.abc import Callable, Mapping

from benchmarks import compression, contexts, sizing, start
from benchmarks.peers.goals import if_decided, verdict_beside
from benchmarks.runs import Result, kind, kl_class, numbers_of
from benchmarks.tensors import batching

# Samples of a run, by the kind of its benchmark; a kind that is not here measures no time, or many pairs of processes.
_ROUNDS: Mapping[str, Callable[[Result], int]] = {
    "peers": lambda r: int(r.get("rounds", 1)),
    "embeddings": lambda r: int(r["rounds"]),
    "busy_machine": lambda r: len(r["samples"]["current"]),
    "contexts": lambda r: len(r["mixed"].get("samples", ())),
    "start": lambda r: min(len(r.get("builds_s", ())), len(r.get("starts_s", ()))),
    "grammars": lambda r: min(map(len, r["samples"].values())),
    "tensors": lambda r: min(len(samples) for key in ("http", "grpc") for samples in r[key].values()),
    "tensors.backends": lambda r: min(len(ones) for of_n in r["samples"].values() for ones in of_n.values()),
    "tensors.routes": lambda r: min(len(samples) for load in r["loads"] for samples in load["samples"].values()),
    "tensors.child": lambda r: len(r["samples"]) // len({sample["n_bytes"] for sample in r["samples"]}),
    "mmlu": lambda _: 1,
    "calibration": lambda _: 1,
}


def goals_of(result: Result) -> list[Result]:
    """Return the goals of a result file, each with today's verdict."""
    rounds = _ROUNDS[kind(result)](result) if kind(result) in _ROUNDS else None
    found = _stored(result)
    if rounds is None:
        return found
    return [g if _of_memory(g) else g | {"verdict": if_decided(g["verdict"], rounds)} for g in found]


def is_later(result: Result) -> bool:
    """Whether the file is older than its goals."""
    return "goal" not in result and "goals" not in result


def _stored(result: Result) -> list[Result]:
    if is_later(result):
        return _judged_now(result)
    if "goal" in result:
        return [result["goal"]]
    if kind(result) == "tensors.batching":
        return batching.goals(result["samples"])
    if kind(result) == "sizing":
        return sizing.goals(result["engines"], result["server"][0])
    if kind(result) == "compression":
        return [g | {"verdict": compression.verdict(g)} for g in result["goals"]]
    if kind(result) == "peers":
        return [_beside(result, g) if g.get("against") else g for g in result["goals"]]
    found: list[Result] = result["goals"]
    return found


def _beside(result: Result, goal: Result) -> Result:
    """Judge a speed relative to a peer's again."""
    ours = goal["what"].split(": ")[1].split(" to ")[0]
    kls = (_kl(result, ours), _kl(result, goal["against"]))
    rounds = _ROUNDS["peers"](result)
    return goal | {"verdict": verdict_beside(goal["reached"], goal["goal"], goal["milestone"], *kls, rounds)}


def _kl(result: Result, engine: str) -> float | None:
    described = result["engines"].get(engine)
    return None if described is None else kl_class(engine, numbers_of(engine, described))


def _of_memory(goal: Result) -> bool:
    return str(goal["what"]).endswith(("GiB", "MiB"))


def _judged_now(result: Result) -> list[Result]:
    """By today's goals, for files from before they were written with them."""
    if kind(result) == "contexts":
        return contexts.goals(result["decode"], result["mixed"], result["kv_cache_dtype"], result["shape"])
    if kind(result) == "start":
        return start.goals(
            result["precision"], result["build_s"], result["start_to_first_token_s"], result["resident_beyond_bytes"]
        )
    return []
