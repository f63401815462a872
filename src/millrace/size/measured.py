"""A user's own measurements as operating points: `--measured FILE`.

CSV with model, gpu, precision, tp, isl, osl, concurrency, ttft_ms, itl_ms, e2e_ms, req_s, and ttft_p95_ms, itl_p95_ms,
e2e_p95_ms where they are known; one instance a row. Every mistake names file and line,
also what no such devices could do.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from millrace.engine.tactics import write_whole
from millrace.errors import ConfigError, plain
from millrace.settings import read_given
from millrace.size.models import PRESETS, ModelShape
from millrace.size.points import Point, Source, Waits
from millrace.size.refit import check_point

_MOST_BYTES, _MOST_ROWS = 64 << 20, 200_000
_NEEDED = ("model", "gpu", "precision", "tp", "isl", "osl", "concurrency", "ttft_ms", "itl_ms", "e2e_ms", "req_s")
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
    def number(name: str) -> float:
        try:
            value = float(row[name] or "")
        except ValueError:
            value = math.nan
        if not 0 < value < 1e12:
            raise ConfigError(
                f"{where}: {name} is {row[name]!r:.40}", "a number above 0", "correct it, or leave it out"
            )
        return value

    def text(name: str) -> str:
        value = row[name] or ""
        if not value or plain(value) != value:
            raise ConfigError(f"{where}: {name} is {value!r:.40}", "a name", "correct it, or leave it out")
        return value

    def waits(names: tuple[str, ...]) -> Waits:
        return Waits(*(number(name) / 1e3 for name in names))

    tp = number("tp")
    if tp != int(tp):
        raise ConfigError(f"{where}: tp is {tp:g}", "a whole number of devices", "correct it")
    return Point(
        model=text("model"), device=text("gpu"), precision=text("precision"), tp=int(tp),
        input_tokens=number("isl"), output_tokens=number("osl"), concurrency=number("concurrency"),
        rate=number("req_s"), mean=waits(("ttft_ms", "itl_ms", "e2e_ms")),
        p95=waits(_P95) if all(row.get(name) for name in _P95) else None, source=Source.MEASURED,
    )  # fmt: skip


def write_points(path: Path, points: Sequence[Point]) -> None:
    """As they are read. raises OSError"""
    file = io.StringIO(newline="")
    rows = csv.writer(file)
    rows.writerow((*_NEEDED, *_P95))
    for p in points:
        waits = [p.mean.ttft_s, p.mean.itl_s, p.mean.e2e_s]
        p95 = [] if p.p95 is None else [p.p95.ttft_s, p.p95.itl_s, p.p95.e2e_s]
        rows.writerow([
            p.model, p.device, p.precision, p.tp, f"{p.input_tokens:g}", f"{p.output_tokens:g}",
            f"{p.concurrency:.6g}", *(f"{s * 1e3:.6g}" for s in waits), f"{p.rate:.6g}",
            *([f"{s * 1e3:.6g}" for s in p95] or [""] * len(_P95)),
        ])  # fmt: skip
    write_whole(path, file.getvalue().encode())
