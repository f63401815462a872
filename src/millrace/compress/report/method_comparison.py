"""Comparison of compression methods, measured on one machine for one model: a table and recommendations.

about.json   inputs of the comparison; a folder of another model, text or machine is refused
NAME.json    a method's row, written when it is fully measured, so an interrupted run resumes after the last one;
NAME.w4a8.json is of the same folder, run in another precision than its own
advice.html  the table and the recommendations as a page
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from millrace.compress.measure.accuracy import Loss
from millrace.compress.measure.speed import Speeds, StepRate, TimedRun
from millrace.compress.recipe import Recipe
from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError
from millrace.kernels.precision import Precision
from millrace.report.page import render
from millrace.settings import read_bounded

VERSION = 1
ABOUT, PAGE = "about.json", "advice.html"
NEAR = 0.01  # KL in nats per token below which answers hardly differ: the bound of --precision auto
SLOWED = 0.5  # share of the source's speed: a recommendation mentions every workload that becomes slower than this
_AS_SMALL = 1.01
_MAX_BYTES = 16 << 20
S = TypeVar("S", bound=msgspec.Struct)


class ComparisonInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """model: its identity; text: digest of the tokens to measure on; batch: sequences of the large batch
    machine, threads, isa: on which times were measured"""

    model: str
    source: str
    text: str
    batch: int
    machine: str
    threads: int
    isa: str
    bytes_before: int
    version: int = VERSION


class MethodRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method's results. refused: why the model does not support it; then nothing else is set

    precision: of the engine; "" for the folder's own
    statistics: digest of their text, "" if the method needs none
    seconds: of rounding and writing; statistics_s: of collecting statistics in the same run, for the first that needed
    them; speed: decode of 1 and of the large batch, and prefill, alternating with the source
    """

    name: str
    precision: str = ""
    refused: str = ""
    statistics: str = ""
    bits_per_weight: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    statistics_s: float | None = None
    loss: Loss | None = None
    speed: Speeds | None = None

    @property
    def title(self) -> str:
        return f"{self.name} as {self.precision}" if self.precision else self.name

    def pace(self, work: str) -> TimedRun:
        assert self.speed is not None
        return next(pace for pace in self.speed.paces if pace.work.startswith(work))


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation for a target, as text. rows: the methods that it names, in order; empty to keep the source."""

    target: str
    words: str
    rows: tuple[MethodRow, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A goal. works: prefix of the names of the workloads that measure it; "" for bytes (fewer are better)"""

    name: str
    work: str


def targets(batch: int) -> list[Target]:
    return [
        Target("one answer at a time", "decode, alone"), Target(f"{batch} answers at a time", f"decode, {batch} "),
        Target("long prompts", "prefill"), Target("memory", ""),
    ]  # fmt: skip


def precisions_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the precisions to measure a folder in: "" for its own, and W4A8 if it is W4A16."""
    usual = recipe.usual
    sixteen = usual.method in ("rtn", "gptq") and usual.bits == 4 and usual.activations != 8
    return ("", Precision.W4A8.value) if sixteen else ("",)


def open_folder(folder: Path, about: ComparisonInputs) -> None:
    """Create a folder, or resume one with the same inputs. raises ConfigError if they differ, or it is not writable"""
    path = folder / ABOUT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(folder.iterdir()):
                raise ConfigError(f"{folder} has other files", "a folder that is new, or one of --advise", "name one")
            write_whole(path, msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}", "a folder for results", "name another") from error
    result = _read(path, ComparisonInputs)
    for name in ComparisonInputs.__struct_fields__:
        if getattr(result, name) != getattr(about, name):
            raise ConfigError(
                f"{folder} has figures of {name} {getattr(result, name)!s:.80}", f"{getattr(about, name)!s:.80}",
                "name another folder with -o",
            )  # fmt: skip


def read_row(folder: Path, name: str, statistics: str, precision: str = "") -> MethodRow | None:
    """Read a row; None if not yet measured. raises ConfigError if it is damaged, or of other statistics"""
    path = _path(folder, name, precision)
    if not path.exists():
        return None
    result = _read(path, MethodRow)
    if result.statistics and result.statistics != statistics:
        raise ConfigError(
            f"{path} has figures of another calibration text", "the same for all methods", "name another folder with -o"
        )
    return result


def write_row(folder: Path, row: MethodRow) -> None:
    write_whole(_path(folder, row.name, row.precision), msgspec.json.format(msgspec.json.encode(row)) + b"\n")


def _path(folder: Path, name: str, precision: str) -> Path:
    return folder / (f"{name}.{precision}.json" if precision else f"{name}.json")


def _read(path: Path, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(read_bounded(path, _MAX_BYTES), type=kind)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "what was measured", "check the file") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}", "what was measured", "remove it: it is measured again"
        ) from error


def advice(rows: Sequence[MethodRow], about: ComparisonInputs) -> list[Advice]:
    """Recommend a method for each target: the best with a small loss, and the gain of accepting more loss."""
    measured = [row for row in rows if row.loss is not None]
    return [_advised(measured, target, about) for target in targets(about.batch)] if measured else []


def _advised(rows: Sequence[MethodRow], target: Target, about: ComparisonInputs) -> Advice:
    near = [row for row in rows if _kl(row) <= NEAR]
    any_loss = _best(rows, target)
    if not near:
        least = min(rows, key=_kl)
        text = f"none keeps within KL {NEAR:g}: {least.title} loses least (KL {_kl(least):.3g}), "
        return _with_offers(target, text + _gain(least, target, about), (least,), rows, about)
    best, named = _best(near, target), []
    if _gains(best, target, about):
        text = f"{best.title}: {_gain(best, target, about)}, KL {_kl(best):.3g}"
        named.append(best)
    else:
        text = f"leave it as it is: {best.title}, the best within KL {NEAR:g}, has {_gain(best, target, about)}"
    if _kl(any_loss) > NEAR and _is_better(any_loss, best, target) and _gains(any_loss, target, about):
        loss = any_loss.loss
        assert loss is not None
        text += (
            f". {any_loss.title} has {_gain(any_loss, target, about)}, for KL {loss.kl:.3g}: of its likeliest tokens "
            f"{1 - loss.agreement:.0%} are others"
        )
        named.append(any_loss)
    return _with_offers(target, text, tuple(named), rows, about)


def _with_offers(
    target: Target, text: str, named: tuple[MethodRow, ...], rows: Sequence[MethodRow], about: ComparisonInputs
) -> Advice:
    """Add the other precision of each recommended folder, if it is worth its loss."""
    offers = []
    for row in named:
        other = _other_precision(row, rows)
        ahead = [t for t in targets(about.batch) if other and t.work and _is_better(other, row, t)]
        if other is None or other in named or not ahead:
            continue
        offers.append(other)
        gains = [f"{t.name} at {_times(other, t)} rather than {_times(row, t)} times" for t in ahead]
        text += f". {other.title} has {' and '.join(gains)}, KL {_kl(other):.3g} rather than {_kl(row):.3g}"
    return Advice(target.name, text, (*named, *offers))


def _other_precision(row: MethodRow, rows: Sequence[MethodRow]) -> MethodRow | None:
    """Return the same folder's W4A8 row if its loss is within the bound.

    If the folder's own precision exceeds the bound, W4A8 may add at most as much again.
    """
    same_method = (other for other in rows if other.name == row.name and other.precision and not row.precision)
    other = next(same_method, None)
    if other is None or _kl(other) <= NEAR:
        return other
    return other if _kl(row) > NEAR and _kl(other) - _kl(row) <= NEAR else None


def _times(row: MethodRow, target: Target) -> str:
    return f"{_relative(row, target).median:.2f}"


def _kl(row: MethodRow) -> float:
    assert row.loss is not None
    return row.loss.kl


def _best(rows: Sequence[MethodRow], target: Target) -> MethodRow:
    """Return the smallest or fastest method; among near ties, the one with the least loss.

    Ties are within 1 % of the bytes, or have rounds that overlap with the fastest's.
    """
    if not target.work:
        least = min(row.bytes for row in rows)
        return min((row for row in rows if row.bytes <= _AS_SMALL * least), key=_kl)
    fastest = max(rows, key=lambda row: _relative(row, target).median)
    low = _relative(fastest, target).low
    return min((row for row in rows if _relative(row, target).high >= low), key=_kl)


def _is_better(row: MethodRow, other: MethodRow, target: Target) -> bool:
    if not target.work:
        return _AS_SMALL * row.bytes < other.bytes
    return _relative(row, target).low > _relative(other, target).high


def _relative(row: MethodRow, target: Target) -> StepRate:
    """Return the rate relative to the source's in the same rounds, because the machine's speed varies over time.

    low, high: over all pairs of rounds, because other load on memory bandwidth slows only the one that reads more
    """
    compressed, source = row.pace(target.work).made, row.pace(target.work).source
    return StepRate(compressed.median / source.median, compressed.low / source.high, compressed.high / source.low)


def _gains(row: MethodRow, target: Target, about: ComparisonInputs) -> bool:
    return row.bytes < about.bytes_before if not target.work else _relative(row, target).median > 1


def _gain(row: MethodRow, target: Target, about: ComparisonInputs) -> str:
    """Describe the gain, and each workload that becomes slower."""
    if not target.work:
        speed, gain = 1.0, f"{row.bytes / about.bytes_before:.0%} of the source's bytes"
    else:
        speed = _relative(row, target).median
        gain = f"{speed:.2f} times the source's speed ({row.pace(target.work).made.median:,.0f} tokens/s)"
    slowed = [t for t in targets(about.batch) if t.work and t != target and _relative(row, t).median < SLOWED < speed]
    losses = [f"{t.name} at {_times(row, t)} times" for t in slowed]
    return f"{gain}, but {' and '.join(losses)}" if losses else gain


HEADER = ("method", "KL", "perplexity", "same token", "bits", "bytes", "decode 1", "decode N", "prefill", "seconds")


def cells(rows: Sequence[MethodRow], about: ComparisonInputs, size: Callable[[float], str]) -> list[list[str]]:
    """Return the table's lines, the source's first.

    Speeds are in tokens per second, with the ratio to the source's in the same rounds in brackets.
    """
    result = []
    first = next((row for row in rows if row.speed is not None), None)
    if first is not None:
        speeds = [f"{first.pace(t.work).source.median:,.0f}" for t in targets(about.batch) if t.work]
        result.append(["as it is", "", "", "", "", size(about.bytes_before), *speeds, ""])
    for row in rows:
        if row.loss is None or row.speed is None:
            result.append([row.title, f"not for this model: {row.refused}", *[""] * 8])
            continue
        works = [t for t in targets(about.batch) if t.work]
        speeds = [f"{row.pace(t.work).made.median:,.0f} ({_relative(row, t).median:.2f})" for t in works]
        growth = row.loss.perplexity / row.loss.source_perplexity - 1
        result.append([
            row.title, f"{row.loss.kl:.3g}", f"{growth:+.1%}", f"{row.loss.agreement:.1%}",
            f"{row.bits_per_weight:.2f}", size(row.bytes), *speeds, f"{row.seconds:.0f}",
        ])  # fmt: skip
    return result


def write_page(
    folder: Path,
    rows: Sequence[MethodRow],
    about: ComparisonInputs,
    size: Callable[[float], str],
    commands: Sequence[str] = (),
) -> None:
    """Write the page. commands: how to produce the recommended checkpoints"""
    collected = next((row.statistics_s for row in rows if row.statistics_s is not None), None)
    values: dict[str, Any] = {
        "a": about, "header": [h.replace("N", str(about.batch)) for h in HEADER], "rows": cells(rows, about, size),
        "advice": advice(rows, about), "commands": commands, "near": NEAR, "collected": collected,
        "precision": next((row.speed.source_precision for row in rows if row.speed is not None), ""),
        "tokens": next((row.loss.tokens for row in rows if row.loss is not None), 0),
    }  # fmt: skip
    write_whole(folder / PAGE, render(Path(__file__).with_name("method_comparison.html"), **values).encode())
