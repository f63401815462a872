"""Joint histogram of input and output lengths, read from a file and sampled by seed.

The file is JSON: {"isl_edges": [1, 64, 129], "osl_edges": [1, 200], "counts": [[5], [3]]} means five requests of 1 to
63 input and 1 to 199 output tokens, and three of 64 to 128. `millrace bench -o` writes it as `histogram.json`.
`requests.jsonl` and traces (of `serve --record`, Mooncake, Azure) are read with the lengths of each line.
"""

import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

from millrace.bench.client.request_record import BenchRecord
from millrace.errors import ConfigError
from millrace.tune.trace_formats import (
    MAX_TOKENS,
    Lines,
    first_byte,
    numbered_lines,
    open_trace,
    raise_line_error,
    rows,
)

NAME = "histogram.json"
MAX_BINS = 1 << 20
_BINS = 32  # of each length, in written histograms
_PAIRS = (("input_length", "output_length"), ("n_prompt", "n_output"))  # keys in a trace, in a result
Bin = tuple[int, int, int, int]  # lowest and highest input tokens, lowest and highest output tokens


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """A histogram. upto: cumulative counts"""

    bins: Sequence[Bin]
    upto: Sequence[int]

    @classmethod
    def from_counts(cls, counts: Mapping[Bin, int]) -> "LengthHistogram":
        """Create a histogram with sorted bins."""
        filled = sorted((b, n) for b, n in counts.items() if n)
        return cls([b for b, _ in filled], list(accumulate(n for _, n in filled)))

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Sample input and output tokens: a bin by its count, then uniformly within it."""
        low, high, out_low, out_high = self.bins[bisect_right(self.upto, rng.randrange(self.upto[-1]))]
        return rng.randint(low, high), rng.randint(out_low, out_high)


def histogram_to_dict(answers: Sequence[BenchRecord]) -> dict[str, Any] | None:
    """Return the histogram of complete answers in the file's format; None if the server reports no input lengths.

    Bins are single lengths if there are few, otherwise of equal width.
    """
    pairs = [(a.n_prompt, a.n_output) for a in answers if a.n_prompt and a.n_output and a.failure is None]
    if not pairs:
        return None
    edges = [_edges([pair[i] for pair in pairs]) for i in (0, 1)]
    counts = [[0] * (len(edges[1]) - 1) for _ in edges[0][1:]]
    for n_input, n_output in pairs:
        counts[bisect_right(edges[0], n_input) - 1][bisect_right(edges[1], n_output) - 1] += 1
    return {"isl_edges": edges[0], "osl_edges": edges[1], "counts": counts}


def _edges(lengths: Sequence[int]) -> list[int]:
    least, most = min(lengths), max(lengths) + 1
    different = sorted({*lengths, *(n + 1 for n in lengths)})
    if len(different) <= _BINS:
        return different
    width = -(-(most - least) // _BINS)
    return list(range(least, most + width, width))


def read_histogram(path: Path) -> LengthHistogram:
    """Read a histogram, a trace or a result. raises ConfigError that names file and line"""
    path = path / NAME if path.is_dir() else path
    with open_trace(path, "a histogram, a trace, or requests.jsonl") as file:
        if first_byte(file) == b"T":
            return _of_pairs(path, ((row.n_input, row.n_output) for row in rows(numbered_lines(file, path), path)))
        first = next(numbered_lines(file, path), (0, b""))[1]
        file.seek(0)
        if (fields := _object(first)) is not None and _pair(fields) is not None:
            return _of_pairs(path, _pairs(path, numbered_lines(file, path)))
        try:
            return _of_counts(path, json.loads(file.read().decode("utf-8-sig")))
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}", '{"isl_edges": ...}, or lines', "correct it") from None


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _pair(fields: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the lengths of a line of a trace or a result."""
    return next(((fields[a], fields[b]) for a, b in _PAIRS if a in fields and b in fields), None)


def _pairs(path: Path, lines: Lines) -> Iterator[tuple[int, int]]:
    """Yield the lengths of all lines; failed answers and unknown lengths are skipped."""
    for number, line in lines:
        fields = _object(line)
        pair = None if fields is None else _pair(fields)
        if fields is None or pair is None:
            raise_line_error(
                path, number, f"{line.decode(errors='replace').strip():.80}", "lengths, as in the first line"
            )
        if fields.get("failure") is not None or pair[0] is None:
            continue
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_TOKENS for n in pair):
            raise_line_error(path, number, f"the lengths {pair!r:.80}", f"tokens up to {MAX_TOKENS}")
        yield pair


def _of_pairs(path: Path, pairs: Iterator[tuple[int, int]]) -> LengthHistogram:
    """Create a histogram of exact lengths; a length of 0 counts as 1."""
    counts: Counter[Bin] = Counter()
    for n_input, n_output in ((max(1, a), max(1, b)) for a, b in pairs):
        counts[n_input, n_input, n_output, n_output] += 1
    if not counts:
        _wrong(str(path), "no request with its lengths", "one at least")
    return LengthHistogram.from_counts(counts)


def _of_counts(path: Path, document: Any) -> LengthHistogram:
    if not isinstance(document, dict):
        _wrong(str(path), "no JSON object", '{"isl_edges": [...], "osl_edges": [...], "counts": [[...]]}')
    edges = [document.get(name) for name in ("isl_edges", "osl_edges")]
    for name, values in zip(("isl_edges", "osl_edges"), edges, strict=True):
        if not (isinstance(values, list) and 2 <= len(values) <= MAX_BINS and all(map(_is_count, values))):
            _wrong(str(path), f'"{name}" is {values!r:.60}', "two whole numbers at least")
        if values[0] < 1 or values[-1] > MAX_TOKENS or any(a >= b for a, b in pairwise(values)):
            _wrong(str(path), f'"{name}" is {values!r:.60}', f"numbers that grow, from 1 to {MAX_TOKENS}")
    inputs, outputs = edges
    assert inputs is not None and outputs is not None
    rows = document.get("counts")
    if not (isinstance(rows, list) and len(rows) == len(inputs) - 1) or any(
        not isinstance(row, list) or len(row) != len(outputs) - 1 or not all(map(_is_count, row)) for row in rows
    ):
        _wrong(str(path), '"counts" does not fit', f"{len(inputs) - 1} lists of {len(outputs) - 1} whole numbers")
    if not any(map(any, rows)):
        _wrong(str(path), '"counts" are all 0', "one request at least")
    return LengthHistogram.from_counts(
        {
            (inputs[i], inputs[i + 1] - 1, outputs[j], outputs[j + 1] - 1): n
            for i, row in enumerate(rows)
            for j, n in enumerate(row)
        }
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53


def _wrong(location: str, problem: str, expected: str) -> NoReturn:
    raise ConfigError(f"{location}: {problem}", expected, "correct it")
