"""Sequential calls (agent chains) modelled as one request: each call waits for the whole answer of the previous one."""

from collections.abc import Sequence
from dataclasses import replace

from millrace.size.performance.operating_point import OperatingPoint, Waits


def in_flight(lengths: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the mean input and output tokens of a call in flight. seconds: duration of each call"""
    shares = [took / sum(seconds) for took in seconds]
    n_in, n_out = (sum(n * share for n, share in zip(some, shares, strict=True)) for some in zip(*lengths, strict=True))
    return n_in, n_out


def chain_calls(points: Sequence[Sequence[OperatingPoint]]) -> list[OperatingPoint]:
    """Combine the operating points of each call alone; those of a single call are returned unchanged.

    Each call takes its share of an instance's time, so the times of a request add up and Little's law holds. TTFT is
    the time to the last call's first token.
    """
    if len(points) == 1:
        return list(points[0])
    by_place = [{(p.configuration, p.concurrency): p for p in some} for some in points]
    places = [place for place in by_place[0] if all(place in by_key for by_key in by_place)]
    fewest: dict[str, float] = {}
    for name, n in places:
        fewest[name] = min(n, fewest.get(name, n))
    alone = {name: [some[name, n].mean.e2e_s for some in by_place] for name, n in fewest.items()}
    return [_combine([some[place] for some in by_place], alone[place[0]]) for place in places]


def _combine(calls: Sequence[OperatingPoint], alone_s: Sequence[float]) -> OperatingPoint:
    """Combine points of the same configuration. alone_s: duration of each call at the lowest concurrency"""

    def waits(parts: Sequence[Waits]) -> Waits:
        waited = sum(w.e2e_s for w in parts[:-1])
        return Waits(waited + parts[-1].ttft_s, parts[-1].itl_s, waited + parts[-1].e2e_s)

    lengths = tuple((point.input_tokens, point.output_tokens) for point in calls)
    n_in, n_out = in_flight(lengths, alone_s)
    p95s = [point.p95 for point in calls if point.p95 is not None]
    return replace(
        calls[-1], rate=1 / sum(1 / point.rate for point in calls), mean=waits([point.mean for point in calls]),
        p95=waits(p95s) if len(p95s) == len(calls) else None,
        input_tokens=n_in, output_tokens=n_out, calls=lengths,
    )  # fmt: skip
