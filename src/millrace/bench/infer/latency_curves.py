"""Curves of inferences/s against latency, of a run and of earlier ones to compare with."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.settings import read_bounded

SCHEMA = 1  # of the summary.json that `bench infer` writes
_MAX_BYTES, _MAX_POINTS = 1 << 24, 1000


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a curve. median_ms: of a request with its whole batch; load: concurrency, or requests/s"""

    load: str
    median_ms: float
    rate: float


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """A curve of one batch size. instances: from the server's configuration, "" if unknown"""

    instances: str
    batch: int
    dots: tuple[Dot, ...]


def curves_of(report: Mapping[str, Any], instances: str | None = None) -> list[LatencyCurve]:
    """Return a curve for each batch size of a report, from the lightest load. raises KeyError, ValueError"""
    by_size: dict[int, list[Dot]] = {}
    points = report["points"]
    if len(points) > _MAX_POINTS:
        raise ValueError(f"{len(points)} points, of {_MAX_POINTS} at most")
    for p in points:
        if p["latency_ms"] is not None:
            load = p["concurrency"] or f"{float(p['request_rate']):g}"
            median_ms, rate = float(p["latency_ms"]["p50"]), float(p["inferences_per_s"]["value"])
            if not (0 < median_ms < math.inf and 0 < rate < math.inf):
                raise ValueError(f"{rate:g} inferences/s at {median_ms:g} ms")
            by_size.setdefault(int(p["batch_size"]), []).append(Dot(str(load), median_ms, rate))
    instance_label = str(report["model"]["instances"]) if instances is None else instances
    return [LatencyCurve(instance_label, size, tuple(dots)) for size, dots in sorted(by_size.items())]


def read_curves(path: Path) -> list[LatencyCurve]:
    """Read the curves of an earlier result: its folder, or the summary.json in it. raises ConfigError"""
    file = path / "summary.json" if path.is_dir() else path
    try:
        text = read_bounded(file, _MAX_BYTES)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES >> 20} MiB")
        report = json.loads(text)
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema {report['schema']!r:.20}, where {SCHEMA} is known")
        curves = curves_of(report)
    except OSError as error:
        raise _no_result(file, error.strerror or "it cannot be read") from None
    except json.JSONDecodeError as error:
        raise _no_result(file, f"not JSON: {error.msg}") from None
    except KeyError as error:
        raise _no_result(file, f'no "{error.args[0]}"') from None
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise _no_result(file, str(error)) from None
    if not curves:
        raise _no_result(file, "no request was answered there")
    return curves


def _no_result(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--beside {file}: {reason}",
        "what `millrace bench infer -o FOLDER` wrote",
        "give that folder, or its summary.json",
    )


def labels(lines: Sequence[LatencyCurve]) -> list[str]:
    """Return labels of batch sizes, with instances if they differ."""
    if len({line.instances for line in lines}) < 2:
        return [f"batch {line.batch}" for line in lines]
    return [f"batch {line.batch}, {line.instances or 'instances not told'}" for line in lines]
