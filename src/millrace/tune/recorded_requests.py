"""Recorded requests as arrays, from `millrace serve --record` and similar traces.

- lines of JSON: {"timestamp": ms, "input_length": n, "output_length": n}, optionally with "hash_ids" (an id per 512
  tokens of the prompt; equal leading ids mean equal prefixes), "duration", "waited" (ms), "choices" and "max_tokens"
- Azure's trace: CSV of TIMESTAMP,ContextTokens,GeneratedTokens

Errors name file and line.
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
from millrace.tune.trace_formats import (
    BLOCK,
    MAX_TOKENS,
    Lines,
    first_byte,
    numbered_lines,
    open_trace,
    raise_line_error,
    rows,
)

DATED_MS = 1e12  # larger timestamps are Unix times (2001 and later), smaller ones relative
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RecordedLine(msgspec.Struct):
    """One recorded request in milliseconds and tokens; output_length: of all choices together"""

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
    """N requests in order of arrival.

    at_s: (N,) Unix times if `dated`, otherwise relative; n_input, n_output: (N,) tokens, output of all choices together
    choices: (N,); max_tokens: (N,) limit per choice, 0 if the request set none
    stay_s, waited_s: (N,) from the first step to the end, and before that; None if not recorded
    block_of, block_id: (B,) the request that each block of 512 tokens belongs to, and its id
    """

    at_s: Floats
    n_input: Ints
    n_output: Ints
    choices: Ints
    max_tokens: Ints
    stay_s: Floats | None
    waited_s: Floats | None
    block_of: Ints
    block_id: Ints
    dated: bool

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def span_s(self) -> float:
        """Return the seconds from the first arrival to the last."""
        return float(self.at_s[-1] - self.at_s[0])

    @property
    def answers(self) -> Ints:
        """Return the (N,) mean answer length per choice, rounded up; only the total of all choices is recorded."""
        return -(-self.n_output // self.choices)

    @property
    def needed(self) -> Ints:
        """Return the (N,) context that each request needs: prompt plus the actual or maximum answer."""
        return self.n_input + np.maximum(self.answers, self.max_tokens)


def read_recording(path: Path) -> Recording:
    """Read a recording. raises ConfigError"""
    with open_trace(path, "a recording") as file:
        return _arrays(_parse(numbered_lines(file, path), first_byte(file) == b"T", path), path)


def _parse(lines: Lines, is_azure: bool, path: Path) -> Iterator[RecordedLine]:
    if is_azure:
        yield from (RecordedLine(row.at_s * 1e3, row.n_input, row.n_output) for row in rows(lines, path))
        return
    timed: bool | None = None
    decoder = msgspec.json.Decoder(RecordedLine)
    for number, line in lines:
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            expected = '{"timestamp": ms, "input_length": n, "output_length": n, ...}, as `serve --record` writes'
            raise_line_error(path, number, sanitize(str(error)), expected)
        if record.waited > (record.duration or 0):
            raise_line_error(path, number, f'"waited" is {record.waited:g}', '"waited" within "duration"')
        if timed is not None and timed != (record.duration is not None):
            raise_line_error(path, number, f'{"no" if timed else "a"} "duration"', "one in every line, or in none")
        timed = record.duration is not None
        yield record


def _arrays(lines: Iterator[RecordedLine], path: Path) -> Recording:
    times, stays, waits = array("d"), array("d"), array("d")
    inputs, outputs, choices, max_tokens = array("q"), array("q"), array("q"), array("q")
    owners, ids, timed = array("q"), array("q"), False
    for n, line in enumerate(lines):
        timed = line.duration is not None
        times.append(line.timestamp)
        stays.append((line.duration or 0) - line.waited)
        waits.append(line.waited)
        for column, value in ((inputs, line.input_length), (outputs, line.output_length),
                            (choices, line.choices), (max_tokens, line.max_tokens)):  # fmt: skip
            column.append(value)
        covered = line.hash_ids[: -(-line.input_length // BLOCK)]
        owners.extend([n] * len(covered))
        ids.extend(covered)
    if not times:
        raise ConfigError(f"{path} holds no request", "one for each line", "check the file")
    at_ms = np.array(times)
    order = np.argsort(at_ms, kind="stable")  # lines are in order of completion
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    owner, block = place[np.array(owners, np.int64)], np.array(ids, np.int64)
    by_request = np.argsort(owner, kind="stable")
    stay, wait = np.array(stays)[order] / 1e3, np.array(waits)[order] / 1e3
    return Recording(
        at_s=at_ms[order] / 1e3, n_input=np.array(inputs, np.int64)[order], n_output=np.array(outputs, np.int64)[order],
        choices=np.array(choices, np.int64)[order], max_tokens=np.array(max_tokens, np.int64)[order],
        stay_s=stay if timed else None, waited_s=wait if timed else None,
        block_of=owner[by_request], block_id=block[by_request], dated=bool(at_ms[order[0]] >= DATED_MS),
    )  # fmt: skip
