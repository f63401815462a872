"""Recorded requests as arrays: what `millrace serve --record` writes, and traces like it.

- lines of JSON: {"timestamp": ms, "input_length": n, "output_length": n}, each with "hash_ids" (an id for each 512
  tokens of the prompt; equal ids begin alike), "duration", "waited" (ms), "choices" and "max_tokens" where it has them
- Azure's trace: CSV of TIMESTAMP,ContextTokens,GeneratedTokens

Every mistake names file and line.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError, sanitize
from millrace.tune.trace_formats import BLOCK, MOST_TOKENS, Lines, begins, numbered, opened, rows, wrong

DATED_MS = 1e12  # from here on a time counts from 1970 (2001 and later), else from somewhere
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Line(msgspec.Struct):
    """One request, in milliseconds and tokens; output_length: of all its choices."""

    timestamp: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]] = []
    duration: _Duration | None = None
    waited: _Duration = 0.0
    choices: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    max_tokens: _Count = 0


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """N requests in the order in which they came.

    at_s: (N,) since 1970 where `dated`, else since somewhere; n_input, n_output: (N,), the latter of all choices
    choices: (N,); asked: (N,) tokens that a choice might have had, 0 where the request did not say
    stay_s, waited_s: (N,) from the first step to the end, and before that; None where the file does not say
    block_of, block_id: (B,) which request each block of 512 tokens belongs to, and its id
    """

    at_s: Floats
    n_input: Ints
    n_output: Ints
    choices: Ints
    asked: Ints
    stay_s: Floats | None
    waited_s: Floats | None
    block_of: Ints
    block_id: Ints
    dated: bool

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.at_s[-1] - self.at_s[0])

    @property
    def answers(self) -> Ints:
        """(N,) tokens of the longest answer, at least: those of n choices are known together only."""
        return -(-self.n_output // self.choices)

    @property
    def needed(self) -> Ints:
        """(N,) the context in which a request is served: prompt, and what its answer had or might have had."""
        return self.n_input + np.maximum(self.answers, self.asked)


def read_recording(path: Path) -> Recording:
    """raises ConfigError"""
    with opened(path, "a recording") as file:
        return _arrays(_parsed(numbered(file, path), begins(file) == b"T", path), path)


def _parsed(lines: Lines, is_azure: bool, path: Path) -> Iterator[Line]:
    if is_azure:
        yield from (Line(row.at_s * 1e3, row.n_input, row.n_output) for row in rows(lines, path))
        return
    timed: bool | None = None
    decoder = msgspec.json.Decoder(Line)
    for number, line in lines:
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            expected = '{"timestamp": ms, "input_length": n, "output_length": n, ...}, as `serve --record` writes'
            wrong(path, number, sanitize(str(error)), expected)
        if found.waited > (found.duration or 0):
            wrong(path, number, f'"waited" is {found.waited:g}', '"waited" within "duration"')
        if timed is not None and timed != (found.duration is not None):
            wrong(path, number, f'{"no" if timed else "a"} "duration"', "one in every line, or in none")
        timed = found.duration is not None
        yield found


def _arrays(lines: Iterator[Line], path: Path) -> Recording:
    times, stays, waits = array("d"), array("d"), array("d")
    inputs, outputs, choices, asked = array("q"), array("q"), array("q"), array("q")
    owners, ids, timed = array("q"), array("q"), False
    for n, line in enumerate(lines):
        timed = line.duration is not None
        times.append(line.timestamp)
        stays.append((line.duration or 0) - line.waited)
        waits.append(line.waited)
        for kept, value in ((inputs, line.input_length), (outputs, line.output_length),
                            (choices, line.choices), (asked, line.max_tokens)):  # fmt: skip
            kept.append(value)
        covered = line.hash_ids[: -(-line.input_length // BLOCK)]
        owners.extend([n] * len(covered))
        ids.extend(covered)
    if not times:
        raise ConfigError(f"{path} holds no request", "one for each line", "check the file")
    at_ms = np.array(times)
    order = np.argsort(at_ms, kind="stable")  # lines are in the order of their ends
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    owner, block = place[np.array(owners, np.int64)], np.array(ids, np.int64)
    by_request = np.argsort(owner, kind="stable")
    stay, wait = np.array(stays)[order] / 1e3, np.array(waits)[order] / 1e3
    return Recording(
        at_s=at_ms[order] / 1e3, n_input=np.array(inputs, np.int64)[order], n_output=np.array(outputs, np.int64)[order],
        choices=np.array(choices, np.int64)[order], asked=np.array(asked, np.int64)[order],
        stay_s=stay if timed else None, waited_s=wait if timed else None,
        block_of=owner[by_request], block_id=block[by_request], dated=bool(at_ms[order[0]] >= DATED_MS),
    )  # fmt: skip
