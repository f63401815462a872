"""Derives engine sizes from recorded requests: context, batch, KV pages, and the row counts to time.

No distribution is assumed: each choice is a percentile of the recording.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.compile.tune.tuning_cases import USUAL_ROWS, TunedRows
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.errors import ConfigError
from millrace.tune.kv_occupancy import page_spans, pages, sequences, uncached_tokens
from millrace.tune.recorded_requests import Ints, Recording

FEWEST = 59  # requests, so that with 95 % confidence the longest covers 95 % of future ones (0.95 ** 59 < 0.05)
BUSY = 99.0  # percent of arrivals that find a free place, and their pages
MAX_BATCH = 1024
WAITING = 0.1  # share of a request's time from which it counts as queued
SHOWN = (50, 90, 99, 100)
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSummary:
    """Inputs besides the recording. covers: percent of requests that must fit into the context

    model_context: the model's limit; usual_batch: default if the recording has no durations
    max_context, max_batch: values of flags, if given
    """

    model_context: int
    usual_batch: int
    step_tokens: int
    covers: float = 100.0
    max_context: int | None = None
    max_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Sizes of an engine for the recorded requests, with their evidence.

    lengths: percentiles of SHOWN by name; sure: percent of similar requests that fit, with 95 % confidence
    n_unfit: recorded requests that exceed the context; longest: context of the longest one
    batch: None if the recording has no durations; peak: highest concurrency
    n_late: arrivals without a free slot; waited: share of requests that queued for a tenth of their time or more
    pages_running, pages_kept: KV pages of running requests; including all shared prefixes
    again: share of prompt tokens that repeat earlier prefixes
    """

    n: int
    lengths: dict[str, dict[str, int]]
    context: int
    longest: int
    n_unfit: int
    sure: float
    batch: int | None
    peak: int
    n_late: int
    waited: float
    pages_running: int
    pages_kept: int
    again: float
    rows: TunedRows


def percentile(values: Ints, q: float) -> int:
    """Return the least recorded value that at least q percent do not exceed, without interpolation."""
    return int(np.percentile(values, q, method="inverted_cdf"))


def percentiles(values: Ints) -> dict[str, int]:
    return {"longest" if q == 100 else f"p{q}": percentile(values, q) for q in SHOWN}


def check_enough(recording: Recording, name: str) -> None:
    """Refuse a recording that is too small. raises ConfigError"""
    if len(recording) < FEWEST:
        raise ConfigError(
            f"{name} holds {len(recording)} request{'s' * (len(recording) != 1)}",
            f"{FEWEST} at least: the longest of these is as long as 95 % of those to come, 19 times of 20",
            "record longer, or say --max-context and --max-batch without --traffic",
        )  # fmt: skip


def propose(recording: Recording, summary: TrafficSummary, among: Mask | None = None) -> Proposal:
    """Derive the sizes. among: (N,) arrivals to fit; the others still occupy the engine while they run"""
    mask = np.ones(len(recording), bool) if among is None else among
    n, needed = int(mask.sum()), recording.needed[mask]
    context = summary.max_context or _context(needed, summary)
    batch, recorded = _batch(recording, summary, mask)
    places = summary.max_batch or batch or summary.usual_batch
    running, retained = _pages(recording, places, mask)
    prompts, fresh = recording.n_input[mask], uncached_tokens(recording)[mask]
    return Proposal(
        n=n,
        lengths={
            "input": percentiles(prompts),
            "output": percentiles(recording.answers[mask]),
            "needed": percentiles(needed),
        },
        context=context,
        longest=int(needed.max()),
        n_unfit=int(np.sum(needed > context)),
        sure=100 * float(0.05 ** (1 / n)),
        batch=batch,
        peak=int(recorded.max(initial=0)),
        n_late=int(np.sum(recorded > places)),
        waited=_queued_share(recording, mask),
        pages_running=running,
        pages_kept=retained,
        again=1 - float(fresh.sum() / max(1, prompts.sum())),
        rows=TunedRows(_decode_rows(recording, places, mask), _prompt_rows(fresh, min(summary.step_tokens, context))),
    )


def _context(needed: Ints, summary: TrafficSummary) -> int:
    """Return the context in whole pages, within the model's limit."""
    tokens = max(percentile(needed, summary.covers), 1)
    return min(-(-tokens // PAGE_TOKENS) * PAGE_TOKENS, summary.model_context)


def _batch(recording: Recording, summary: TrafficSummary, mask: Mask) -> tuple[int | None, Ints]:
    """Return the batch, and the (n,) concurrency at each arrival."""
    if recording.stay_s is None:
        return None, np.zeros(0, np.int64)
    recorded = sequences(recording).at(recording.at_s[mask])
    return min(percentile(recorded, BUSY), MAX_BATCH), recorded


def _queued_share(recording: Recording, mask: Mask) -> float:
    """Return the share of requests that queued; waiting for the running step does not count."""
    if recording.stay_s is None or recording.waited_s is None:
        return 0.0
    waited, stay = recording.waited_s[mask], recording.stay_s[mask]
    return float(np.mean((waited > 0) & (waited >= WAITING * (waited + stay))))


def _pages(recording: Recording, places: int, mask: Mask) -> tuple[int, int]:
    """Return KV pages without and with shared prefixes; without durations, of as many consecutive requests as the
    batch."""
    each = pages(recording)
    sums = np.concatenate([[0], np.cumsum(each)])
    ends = np.flatnonzero(mask) + 1
    in_a_row = percentile(sums[ends] - sums[np.maximum(ends - places, 0)], BUSY)
    if recording.stay_s is None:
        return in_a_row, in_a_row
    times = recording.at_s[mask]
    held_then = page_spans(recording, retained=False).at(times)
    running = np.minimum(held_then, in_a_row)
    between = page_spans(recording, retained=True).at(times) - held_then
    return percentile(running, BUSY), percentile(running + between, BUSY)


def _decode_rows(recording: Recording, places: int, mask: Mask) -> tuple[int, ...]:
    """Return the concurrency of half, 90 % and 99 % of the busy time."""
    if recording.stay_s is None:
        return tuple(n for n in USUAL_ROWS.decode if n <= places)
    times, lasting_s, level = sequences(recording).levels()
    arrival = np.clip(np.searchsorted(recording.at_s, times, side="right") - 1, 0, len(recording) - 1)
    busy = (level > 0) & mask[arrival] & (lasting_s > 0)
    if not busy.any():
        return (1,)
    level, lasting_s = level[busy], lasting_s[busy]
    order = np.argsort(level, kind="stable")
    share = np.cumsum(lasting_s[order]) / lasting_s.sum()
    at = np.minimum(np.searchsorted(share, [0.5, 0.9, 0.99]), len(order) - 1)
    rows = level[order][at].tolist()
    return tuple(sorted({min(n, places) for n in rows}))


def _prompt_rows(fresh: Ints, max_rows: int) -> tuple[int, ...]:
    """Return the uncached tokens of half and of 90 % of the prompts, rounded to powers of two."""
    sizes = (max(16, 1 << (percentile(fresh, q) - 1).bit_length()) for q in (50, 90))
    return tuple(sorted({min(size, max_rows) for size in sizes}))
