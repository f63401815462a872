"""Operating points from a user's measurements: `--measured FILE`.

CSV with model, gpu, precision, tp, isl, osl, concurrency, ttft_ms, itl_ms, e2e_ms, req_s, and optionally ttft_p95_ms,
itl_p95_ms, e2e_p95_ms; one instance a row. Errors name file and line; values that are inconsistent or beyond the
hardware's limits are refused.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError, sanitize
from millrace.report.format_numbers import format_4_digits, format_exact
from millrace.settings import read_bounded
from millrace.size.fit.user_runs import check_point
from millrace.size.performance.models import PRESETS, ModelShape
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits

_MAX_BYTES, _MAX_ROWS = 64 << 20, 200_000
_MAX_FIGURE, _MAX_TP = 1e12, 1024
_NEEDED = ("model", "gpu", "precision", "tp", "isl", "osl", "concurrency", "ttft_ms", "itl_ms", "e2e_ms", "req_s")
_MEAN = ("ttft_ms", "itl_ms", "e2e_ms")
_P95 = ("ttft_p95_ms", "itl_p95_ms", "e2e_p95_ms")
LITTLE = 0.15  # allowed relative deviation of concurrency from rate x time; beyond it a run was not in a steady state


def read_points(path: Path, shapes: Mapping[str, ModelShape] = PRESETS) -> tuple[list[OperatingPoint], int]:
    """Return the points, and how many rows were dropped because they were not in a steady state.

    shapes: models by their lower-case names in the table. raises ConfigError, also if a row exceeds what the devices
    can do for such a model
    """
    try:
        data = read_bounded(path, _MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes", "measurements", "split it")
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        points = list(_read(csv.DictReader(text), path, shapes))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "measurements", "check the path") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV: {error}", "measurements", "check the file") from None
    steady = [p for p in points if abs(p.rate * p.mean.e2e_s / p.concurrency - 1) <= LITTLE]
    if not steady:
        raise ConfigError(
            f"{path}: of {len(points)} rows none has concurrency = rate x time (Little's law)",
            "runs in a steady state", "check the columns' units: ms, and requests/s of one instance",
        )  # fmt: skip
    return steady, len(points) - len(steady)


def _read(rows: "csv.DictReader[str]", path: Path, shapes: Mapping[str, ModelShape]) -> Iterator[OperatingPoint]:
    if missing := [name for name in _NEEDED if name not in (rows.fieldnames or ())]:
        raise ConfigError(
            f"{path} has no column {', '.join(missing)}", f"columns {', '.join(_NEEDED)}", "complete its first line"
        )
    if twice := [name for name in (*_NEEDED, *_P95) if (rows.fieldnames or []).count(name) > 1]:
        raise ConfigError(f"{path} has several columns {', '.join(twice)}", "one each", "leave the others out")
    for row in rows:
        location = f"{path}, line {rows.line_num}"
        if rows.line_num > _MAX_ROWS:
            raise ConfigError(f"{location}: too many rows", f"at most {_MAX_ROWS}", "split it")
        point = _point(row, location)
        if (shape := shapes.get(point.model.casefold())) is not None:
            check_point(point, shape, location)
        yield point


def _point(row: Mapping[str, str | None], location: str) -> OperatingPoint:
    def number(name: str, least: float | None = None) -> float:
        """least: None: above 0"""
        try:
            value = float(row[name] or "")
        except ValueError:
            value = math.nan
        if not (value > 0 if least is None else value >= least) or value > _MAX_FIGURE:
            low = "above 0" if least is None else f"from {least:g}"
            raise ConfigError(f"{location}: {name} is {row[name]!r:.40}", f"a number {low}, at most {_MAX_FIGURE:g}",
                              "correct it, or leave the row out")  # fmt: skip
        return value

    def text(name: str) -> str:
        value = row[name] or ""
        if not value or sanitize(value) != value:
            raise ConfigError(f"{location}: {name} is {value!r:.40}", "a name", "correct it, or leave the row out")
        return value

    def waits(names: tuple[str, ...]) -> Waits:
        ttft, itl, e2e = names
        gap_ms = number(itl, None if osl > 1 else 0)  # nothing comes after a single token
        return Waits(number(ttft) / 1e3, gap_ms / 1e3, number(e2e) / 1e3)

    tp, osl = number("tp"), number("osl", 1)
    if tp != int(tp) or tp > _MAX_TP:
        raise ConfigError(f"{location}: tp is {tp:g}", f"a whole number of devices, at most {_MAX_TP}", "correct it")
    p95_columns = [name for name in _P95 if row.get(name)]
    if p95_columns and len(p95_columns) < len(_P95):
        missing = ", ".join(name for name in _P95 if name not in p95_columns)
        raise ConfigError(f"{location} has {', '.join(p95_columns)} without {missing}", "all of them, or none",
                          "complete the row, or leave them empty")  # fmt: skip
    point = OperatingPoint(
        model=text("model"), device=text("gpu"), precision=text("precision"), tp=int(tp),
        input_tokens=number("isl", 1), output_tokens=osl, concurrency=number("concurrency"), rate=number("req_s"),
        mean=waits(_MEAN), p95=waits(_P95) if p95_columns else None, source=FigureSource.MEASURED,
    )  # fmt: skip
    _check_order(point, location)
    return point


def _check_order(point: OperatingPoint, location: str) -> None:
    """Refuse rows in which TTFT exceeds E2E, or the gaps between tokens do. raises ConfigError

    TTFT <= E2E holds for the p95, too, because it holds for every request. The gaps are checked for the mean only, with
    a tolerance: tools differ in whether a p95 ITL is taken over requests or over gaps.
    """
    units = "check the columns and their units: all times are in ms, from the request on but for itl_ms"
    for waits, (ttft, _, e2e) in ((point.mean, _MEAN), (point.p95, _P95)):
        if waits is not None and waits.ttft_s > waits.e2e_s:
            raise ConfigError(
                f"{location}: {ttft} is {format_exact(waits.ttft_s * 1e3)}, "
                f"and {e2e} {format_exact(waits.e2e_s * 1e3)}",
                "the first token before the last",
                units,
            )
    gaps_s = (point.output_tokens - 1) * point.mean.itl_s
    if gaps_s > point.mean.e2e_s * (1 + LITTLE):
        raise ConfigError(
            f"{location}: {format_exact(point.output_tokens)} tokens {format_exact(point.mean.itl_s * 1e3)} ms apart "
            f"take {format_4_digits(gaps_s * 1e3)} ms, and e2e_ms is {format_exact(point.mean.e2e_s * 1e3)}",
            "e2e_ms = ttft_ms + (osl - 1) x itl_ms",
            units,
        )


def write_points(path: Path, points: Sequence[OperatingPoint]) -> None:
    """Write points in the format that `read_points` reads. raises OSError"""
    file = io.StringIO(newline="")
    rows = csv.writer(file)
    rows.writerow((*_NEEDED, *_P95))
    for p in points:
        waits = [p.mean.ttft_s, p.mean.itl_s, p.mean.e2e_s]
        p95 = [] if p.p95 is None else [p.p95.ttft_s, p.p95.itl_s, p.p95.e2e_s]
        rows.writerow([
            p.model, p.device, p.precision, p.tp, f"{p.input_tokens:.10g}", f"{p.output_tokens:.10g}",
            f"{p.concurrency:.6g}", *(f"{s * 1e3:.6g}" for s in waits), f"{p.rate:.6g}",
            *([f"{s * 1e3:.6g}" for s in p95] or [""] * len(_P95)),
        ])  # fmt: skip
    write_whole(path, file.getvalue().encode())
