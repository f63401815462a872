"""Occupancy over time: sequences and KV pages of recorded requests.

A request is assumed to start when it arrives and to run for as long as recorded, as it would without queueing.
"""

from dataclasses import dataclass

import numpy as np

from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.tune.recorded_requests import Floats, Ints, Recording
from millrace.tune.trace_formats import BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class OccupancySpans:
    """Weighted time spans, (N,) each, from `starts` up to `ends` (exclusive)."""

    starts: Floats
    ends: Floats
    weights: Ints

    def at(self, times: Floats) -> Ints:
        """Return the total weight at each time, including spans that start then."""
        begun, ended = np.argsort(self.starts, kind="stable"), np.argsort(self.ends, kind="stable")
        come = np.concatenate([[0], np.cumsum(self.weights[begun])])
        gone = np.concatenate([[0], np.cumsum(self.weights[ended])])
        n_come = np.searchsorted(self.starts[begun], times, side="right")
        n_gone = np.searchsorted(self.ends[ended], times, side="right")
        return np.asarray(come[n_come] - gone[n_gone], np.int64)

    def levels(self) -> tuple[Floats, Floats, Ints]:
        """Return when the weight changes, how long it then stays, and its value. (M,) each"""
        times = np.unique(np.concatenate([self.starts, self.ends]))
        return times[:-1], np.diff(times), self.at(times[:-1])

    @property
    def parts(self) -> tuple[Floats, Floats, Ints]:
        return self.starts, self.ends, self.weights


def sequences(recording: Recording) -> OccupancySpans:
    """Return the spans of sequences, one per choice. The recording must have durations."""
    starts, ends = _residence_times(recording)
    return OccupancySpans(starts, ends, recording.choices)


def _residence_times(recording: Recording) -> tuple[Floats, Floats]:
    """Return starts and ends of requests; empty spans get the smallest positive length."""
    assert recording.stay_s is not None
    starts = recording.at_s
    return starts, np.maximum(starts + recording.stay_s, np.nextafter(starts, np.inf))


def pages(recording: Recording) -> Ints:
    """Return the (N,) pages of each request at its end; its choices share the full pages of the prompt."""
    r = recording
    each = -(-(r.n_input + r.answers) // PAGE_TOKENS)
    return np.asarray(r.choices * each - (r.choices - 1) * (r.n_input // PAGE_TOKENS), np.int64)


def block_pages(recording: Recording) -> Ints:
    """Return the (B,) full pages of each block; the last block of a prompt may be shorter."""
    r = recording
    first = np.searchsorted(r.block_of, r.block_of, side="left")
    left = r.n_input[r.block_of] - (np.arange(len(r.block_of)) - first) * BLOCK
    return np.asarray(np.clip(left, 0, BLOCK) // PAGE_TOKENS, np.int64)


def page_spans(recording: Recording, *, retained: bool) -> OccupancySpans:
    """Return the spans of KV pages. Shared prefixes count once, while one of their requests runs.

    retained: shared prefixes also stay between their first and last request, so that nothing is recomputed
    """
    r, of_block = recording, block_pages(recording)
    starts, ends = _residence_times(r)
    _, names, uses = np.unique(r.block_id, return_inverse=True, return_counts=True)
    shared = uses[names] > 1
    own = pages(r) - np.bincount(r.block_of[shared], of_block[shared], minlength=len(r)).astype(np.int64)
    owner, name = r.block_of[shared], names[shared]
    order = np.lexsort((starts[owner], name))
    name, begun, ended, size = name[order], starts[owner][order], ends[owner][order], of_block[shared][order]
    if not len(name):
        return OccupancySpans(starts, ends, own)
    new = np.append(True, name[1:] != name[:-1])
    if not retained:
        new[1:] |= begun[1:] > _last_ends(name, ended)[:-1]
    at = np.flatnonzero(new)
    together = OccupancySpans(begun[at], np.maximum.reduceat(ended, at), np.maximum.reduceat(size, at))
    return OccupancySpans(*(np.concatenate(pair) for pair in zip((starts, ends, own), together.parts, strict=True)))


def _last_ends(name: Ints, ended: Floats) -> Floats:
    """Return the (B,) running maximum of ends for each name; equal names are adjacent."""
    low = ended.min()
    step = ended.max() - low + 1
    rank = np.cumsum(np.append(False, name[1:] != name[:-1])) * step
    return np.asarray(np.maximum.accumulate(ended - low + rank) - rank + low, np.float64)


def uncached_tokens(recording: Recording) -> Ints:
    """Return the (N,) prompt tokens to compute if all blocks that arrived earlier are cached."""
    r = recording
    _, index = np.unique(r.block_id, return_index=True)
    new = np.zeros(len(r.block_id), bool)
    new[index] = True  # the first in order of arrival
    cached_tokens = np.bincount(r.block_of[~new], block_pages(r)[~new], minlength=len(r)).astype(np.int64) * PAGE_TOKENS
    return np.asarray(np.maximum(r.n_input - cached_tokens, np.minimum(r.n_input, 1)), np.int64)
