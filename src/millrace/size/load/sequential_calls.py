"""Calls in a row as one request: each waits for the whole answer of the one before, on the same instances."""

from collections.abc import Sequence
from dataclasses import replace

from millrace.size.performance.operating_point import Point, Waits


def in_flight(lengths: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Tokens in and out of what is in flight at a time, on average, of calls in a row that take so long each."""
    shares = [took / sum(seconds) for took in seconds]
    n_in, n_out = (sum(n * share for n, share in zip(some, shares, strict=True)) for some in zip(*lengths, strict=True))
    return n_in, n_out


def chain_calls(points: Sequence[Sequence[Point]]) -> list[Point]:
    """points: of each call by itself, as though there were no other; one call's are returned as they are

    Each call takes its share of an instance's time, so that the times of a request add up, and Little's law holds. The
    first token that a user sees is the last call's.
    """
    if len(points) == 1:
        return list(points[0])
    by_place = [{(p.configuration, p.concurrency): p for p in some} for some in points]
    places = [place for place in by_place[0] if all(place in others for others in by_place)]
    fewest: dict[str, float] = {}
    for name, n in places:
        fewest[name] = min(n, fewest.get(name, n))
    alone = {name: [some[name, n].mean.e2e_s for some in by_place] for name, n in fewest.items()}
    return [_together([some[place] for some in by_place], alone[place[0]]) for place in places]


def _together(calls: Sequence[Point], alone_s: Sequence[float]) -> Point:
    """alone_s: as long as each is in flight, where hardly any other is"""

    def waits(of: Sequence[Waits]) -> Waits:
        waited = sum(w.e2e_s for w in of[:-1])
        return Waits(waited + of[-1].ttft_s, of[-1].itl_s, waited + of[-1].e2e_s)

    lengths = tuple((point.input_tokens, point.output_tokens) for point in calls)
    n_in, n_out = in_flight(lengths, alone_s)
    known = [point.p95 for point in calls if point.p95 is not None]
    return replace(
        calls[-1], rate=1 / sum(1 / point.rate for point in calls), mean=waits([point.mean for point in calls]),
        p95=waits(known) if len(known) == len(calls) else None,
        input_tokens=n_in, output_tokens=n_out, calls=lengths,
    )  # fmt: skip
