"""A user's own measurements as operating points: `--measured FILE`.

CSV with model, gpu, precision, tp, isl, osl, concurrency, ttft_ms, itl_ms, e2e_ms, req_s, and ttft_p95_ms, itl_p95_ms,
e2e_p95_ms where they are known; one instance a row. Every mistake names file and line, also what no run has, and what
no such devices could do.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError, sanitize
from millrace.report.format_numbers import exact, format_4_digits
from millrace.settings import read_given
from millrace.size.fit.user_runs import check_point
from millrace.size.performance.models import PRESETS, ModelShape
from millrace.size.performance.operating_point import Point, Source, Waits

_MOST_BYTES, _MOST_ROWS = 64 << 20, 200_000
_MOST, _MOST_TP = 1e12, 1024
_NEEDED = ("model", "gpu", "precision", "tp", "isl", "osl", "concurrency", "ttft_ms", "itl_ms", "e2e_ms", "req_s")
_MEAN = ("ttft_ms", "itl_ms", "e2e_ms")
_P95 = ("ttft_p95_ms", "itl_p95_ms", "e2e_p95_ms")
LITTLE = 0.15  # how far concurrency may be from rate x time: beyond, a run was not in its steady state


def read_points(path: Path, shapes: Mapping[str, ModelShape] = PRESETS) -> tuple[list[Point], int]:
    """The points, and how many rows were left out because they were not in a steady state.

    shapes: models by their names in the table, in lower case. raises ConfigError, also for a row of such a model that
    no such devices could do
    """
    try:
        data = read_given(path, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes", "measurements", "split it")
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


def _read(rows: "csv.DictReader[str]", path: Path, shapes: Mapping[str, ModelShape]) -> Iterator[Point]:
    if missing := [name for name in _NEEDED if name not in (rows.fieldnames or ())]:
        raise ConfigError(
            f"{path} has no column {', '.join(missing)}", f"columns {', '.join(_NEEDED)}", "complete its first line"
        )
    if twice := [name for name in (*_NEEDED, *_P95) if (rows.fieldnames or []).count(name) > 1]:
        raise ConfigError(f"{path} has several columns {', '.join(twice)}", "one each", "leave the others out")
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        if rows.line_num > _MOST_ROWS:
            raise ConfigError(f"{where}: too many rows", f"at most {_MOST_ROWS}", "split it")
        point = _point(row, where)
        if (shape := shapes.get(point.model.casefold())) is not None:
            check_point(point, shape, where)
        yield point


def _point(row: Mapping[str, str | None], where: str) -> Point:
    def number(name: str, least: float | None = None) -> float:
        """least: None: above 0"""
        try:
            value = float(row[name] or "")
        except ValueError:
            value = math.nan
        if not (value > 0 if least is None else value >= least) or value > _MOST:
            low = "above 0" if least is None else f"from {least:g}"
            raise ConfigError(f"{where}: {name} is {row[name]!r:.40}", f"a number {low}, at most {_MOST:g}",
                              "correct it, or leave the row out")  # fmt: skip
        return value

    def text(name: str) -> str:
        value = row[name] or ""
        if not value or sanitize(value) != value:
            raise ConfigError(f"{where}: {name} is {value!r:.40}", "a name", "correct it, or leave the row out")
        return value

    def waits(names: tuple[str, ...]) -> Waits:
        ttft, itl, e2e = names
        gap_ms = number(itl, None if osl > 1 else 0)  # nothing comes after a single token
        return Waits(number(ttft) / 1e3, gap_ms / 1e3, number(e2e) / 1e3)

    tp, osl = number("tp"), number("osl", 1)
    if tp != int(tp) or tp > _MOST_TP:
        raise ConfigError(f"{where}: tp is {tp:g}", f"a whole number of devices, at most {_MOST_TP}", "correct it")
    told = [name for name in _P95 if row.get(name)]
    if told and len(told) < len(_P95):
        missing = ", ".join(name for name in _P95 if name not in told)
        raise ConfigError(f"{where} has {', '.join(told)} without {missing}", "all of them, or none",
                          "complete the row, or leave them empty")  # fmt: skip
    point = Point(
        model=text("model"), device=text("gpu"), precision=text("precision"), tp=int(tp),
        input_tokens=number("isl", 1), output_tokens=osl, concurrency=number("concurrency"), rate=number("req_s"),
        mean=waits(_MEAN), p95=waits(_P95) if told else None, source=Source.MEASURED,
    )  # fmt: skip
    _check_order(point, where)
    return point


def _check_order(point: Point, where: str) -> None:
    """raises ConfigError where the first token comes after the last, or tokens take longer than the request

    Whoever waits so long for the first token waits for the last one at least as long, so it holds of their p95, too.
    Of gaps it is asked of the mean alone, and roughly: tools differ in whether a p95 is that of requests or of gaps.
    """
    units = "check the columns and their units: all times are in ms, from the request on but for itl_ms"
    for waits, (ttft, _, e2e) in ((point.mean, _MEAN), (point.p95, _P95)):
        if waits is not None and waits.ttft_s > waits.e2e_s:
            raise ConfigError(f"{where}: {ttft} is {exact(waits.ttft_s * 1e3)}, and {e2e} {exact(waits.e2e_s * 1e3)}",
                              "the first token before the last", units)  # fmt: skip
    gaps_s = (point.output_tokens - 1) * point.mean.itl_s
    if gaps_s > point.mean.e2e_s * (1 + LITTLE):
        raise ConfigError(f"{where}: {exact(point.output_tokens)} tokens {exact(point.mean.itl_s * 1e3)} ms apart take "
                          f"{format_4_digits(gaps_s * 1e3)} ms, and e2e_ms is {exact(point.mean.e2e_s * 1e3)}",
                          "e2e_ms = ttft_ms + (osl - 1) x itl_ms", units)  # fmt: skip


def write_points(path: Path, points: Sequence[Point]) -> None:
    """As they are read. raises OSError"""
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
