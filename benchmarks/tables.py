"""What tables of speeds are made of, in the README and in docs/performance.md."""

from collections.abc import Iterable, Sequence

from benchmarks.runs import Numbers, Speed, kl_class

SHOWN = {"prefill-512": "prompt of 512", "decode-1": "1 user", "decode-16": "16 users"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def megabytes(of: Iterable[Speed]) -> str:
    """Of an engine's weights, as each run told it; empty where none did."""
    told = sorted({round(s.weights_bytes / 1e6) for s in of if s.weights_bytes is not None})
    return "-".join(f"{size:,}" for size in dict.fromkeys([told[0], told[-1]])) if told else ""


def kl(engine: str, numbers: Numbers, own: float | None = None) -> str:
    """On the real model. own: as the run itself measured it"""
    found = kl_class(engine, numbers) if own is None else own
    return "" if found is None else f"{found:.2g}"
