"""Curves of inferences a second against latency: of a run, and of earlier ones beside it (other instance counts)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.settings import read_given

SCHEMA = 1  # of summary.json, as `bench infer` writes it
_MOST_BYTES, _MOST_POINTS = 1 << 24, 1000


@dataclass(frozen=True, slots=True)
class Dot:
    """median_ms: of a request with its whole batch; load: requests at a time, or a second"""

    load: str
    median_ms: float
    rate: float


@dataclass(frozen=True, slots=True)
class Line:
    """instances: as the server's configuration has them, "" where it does not say"""

    instances: str
    batch: int
    dots: tuple[Dot, ...]


def lines_of(told: Mapping[str, Any], instances: str | None = None) -> list[Line]:
    """A line for each batch size of a report, from the lightest load to the heaviest. raises KeyError, ValueError"""
    found: dict[int, list[Dot]] = {}
    points = told["points"]
    if len(points) > _MOST_POINTS:
        raise ValueError(f"{len(points)} points, of {_MOST_POINTS} at most")
    for p in points:
        if p["latency_ms"] is not None:
            load = p["concurrency"] or f"{float(p['request_rate']):g}"
            median_ms, rate = float(p["latency_ms"]["p50"]), float(p["inferences_per_s"]["value"])
            if not (0 < median_ms < math.inf and 0 < rate < math.inf):
                raise ValueError(f"{rate:g} inferences/s at {median_ms:g} ms")
            found.setdefault(int(p["batch_size"]), []).append(Dot(str(load), median_ms, rate))
    named = str(told["model"]["instances"]) if instances is None else instances
    return [Line(named, size, tuple(dots)) for size, dots in sorted(found.items())]


def earlier(path: Path) -> list[Line]:
    """Of a result of `bench infer`: its folder, or the summary.json in it. raises ConfigError"""
    file = path / "summary.json" if path.is_dir() else path
    try:
        text = read_given(file, _MOST_BYTES)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
        told = json.loads(text)
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema {told['schema']!r:.20}, where {SCHEMA} is known")
        found = lines_of(told)
    except OSError as error:
        raise _no_result(file, error.strerror or "it cannot be read") from None
    except json.JSONDecodeError as error:
        raise _no_result(file, f"not JSON: {error.msg}") from None
    except KeyError as error:
        raise _no_result(file, f'no "{error.args[0]}"') from None
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise _no_result(file, str(error)) from None
    if not found:
        raise _no_result(file, "no request was answered there")
    return found


def _no_result(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--beside {file}: {why}",
        "what `millrace bench infer -o FOLDER` wrote",
        "give that folder, or its summary.json",
    )


def labels(lines: Sequence[Line]) -> list[str]:
    """Batch sizes, and instances where they are not all alike."""
    if len({line.instances for line in lines}) < 2:
        return [f"batch {line.batch}" for line in lines]
    return [f"batch {line.batch}, {line.instances or 'instances not told'}" for line in lines]
