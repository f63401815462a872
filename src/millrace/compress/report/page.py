"""compression.html: a record as an offline page (report/)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from millrace.compress.checkpoint.compression_record import (
    AnswerChanges,
    AppliedMethod,
    Record,
    add_to_record,
    read_record,
)
from millrace.compress.measure.accuracy import Loss, SimulatedLoss
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, reasons, usual
from millrace.compress.measure.speed import Speeds, StepRate
from millrace.compress.recipe import FP8_GPTQ, FP8_TENSOR
from millrace.engine.artifact.tactics import write_whole
from millrace.report.page import render

PAGE = "compression.html"

_WORST, _MAX_ROWS, _LONGEST, _SHORT = (
    10,
    4096,
    200,
    12,
)  # limits, because a folder may be untrusted: layers, layers, characters, characters of a digest
_METHODS = {"rtn": "to nearest", "gptq": "GPTQ", "fp8": "E4M3", FP8_GPTQ: "E4M3 by GPTQ", FP8_TENSOR: "E4M3"}
_ENERGY = {"output": "its output's energy", "weights": "its weights' energy"}
_SMOOTH = {"awq": "scales moved by AWQ", "smoothquant": "scales moved by SmoothQuant"}
_SEARCH = {"clip": "ranges clipped", "imatrix": "ranges searched by energy", "none": ""}


def write_page(folder: Path, more: Mapping[str, Any] | None = None) -> None:
    """Write the page of a folder's record, after adding `more` to it. raises as `read_record`"""
    if more:
        add_to_record(folder, more)
    write_whole(folder / PAGE, page_of(read_record(folder)).encode())


def page_of(record: Record) -> str:
    """Return the complete page."""
    worst_first = sorted(record.errors, key=lambda layer: -record.errors[layer])[:_MAX_ROWS]
    of_all = usual(record.figures)
    most = _usual_unit(record)
    rows = [_row(record, layer, of_all, most) for layer in worst_first]
    return render(
        Path(__file__).with_name("compression.html"), r=record, name=str(record.recipe.get("name", "?"))[:_LONGEST],
        bytes=(_size(record.bytes_before), _size(record.bytes_after)), loss=_loss(record.measured),
        not_measured=record.loss.get("not_measured", "the run was ended before it"),
        measured=list(_measured(record)), recipe=list(_recipe(record.recipe)),
        speed=_speed(record.speed), mmlu=_mmlu(record.mmlu),
        kinds=list(_kinds(record)), worst=rows[:_WORST], rescued=_rescued(record), layers=rows,
        n_layers=len(record.errors), of=_ENERGY[most],
    )  # fmt: skip


def applied(form: AppliedMethod) -> str:
    """Describe a treatment: "GPTQ, ranges clipped, 4 bits in groups of 64"."""
    search = _SEARCH.get(form.search, f"ranges searched as {form.search} does")
    by_row = "by matrix" if form.method == FP8_TENSOR else "by row"
    grid = f"{form.bits} bits {f'in groups of {form.group}' if form.group else by_row}"
    parts = (_METHODS.get(form.method, form.method), _SMOOTH.get(form.smooth, ""), search, grid)
    return ", ".join(filter(None, (*parts, "with zero points" if form.minimums else "")))


def rescue(layer: LayerDiagnostics) -> str:
    """Describe how much of a layer's loss the method avoided, if known."""
    if layer.nearest is None or not layer.nearest:
        return ""
    moved = "" if layer.moved is None else f"; factors within {layer.moved:.3g} times of each other"
    how = f"by {layer.plain[:_LONGEST]}" if layer.plain else "to nearest"
    return f"{_percent(layer.error)} rather than {_percent(layer.nearest)} {how}{moved}"


def _row(record: Record, layer: str, of_all: LayerDiagnostics, energy_unit: str) -> dict[str, str]:
    one, form = record.figures.get(layer), record.forms.get(layer)
    reason_lines = reasons(one, of_all) if one else []
    return {
        "name": layer[:_LONGEST], "error": _percent(record.errors[layer]) + _unit(one, energy_unit),
        "applied": applied(form) if form else "",
        "rescue": rescue(one) if one else "",
        "why": "; ".join(reason_lines) or ("nothing of it stands out: it is what its format costs" if one else ""),
        "peak": f"{one.peak:.2f}" if one else "", "nearest": _percent(one.nearest) if one else "",
        "heavy": "" if one is None or one.heavy is None else f"{one.heavy:.1%}",
    }  # fmt: skip


def _usual_unit(record: Record) -> str:
    """Return the energy that most errors are relative to; older records have only one kind."""
    units = [one.of for one in record.figures.values() if one.of]
    return max(units, key=units.count) if units else "output" if record.statistics else "weights"


def _unit(layer: LayerDiagnostics | None, energy_unit: str) -> str:
    """Return the unit if it differs from most layers'."""
    return f" of {_ENERGY[layer.of]}" if layer and layer.of and layer.of != energy_unit else ""


def _kinds(record: Record) -> Iterator[dict[str, str]]:
    """Yield medians over layers with the same last part of the name."""
    kinds: dict[str, list[str]] = {}
    for layer in record.errors:
        kinds.setdefault(layer.rpartition(".")[2], []).append(layer)
    for kind, layers in list(kinds.items())[:_MAX_ROWS]:
        own = usual({layer: record.figures[layer] for layer in layers if layer in record.figures})
        forms = {applied(record.forms[layer]): None for layer in layers if layer in record.forms}
        yield {
            "name": kind[:_LONGEST], "n": str(len(layers)), "error": _percent(median(record.errors[x] for x in layers)),
            "nearest": _percent(own.nearest), "peak": f"{own.peak:.2f}" if own.peak else "",
            "heavy": "" if own.heavy is None else f"{own.heavy:.1%}", "applied": "; ".join(forms),
        }  # fmt: skip


def _rescued(record: Record) -> str:
    """Describe how much of the loss of all layers the method avoided."""
    diagnosed = [one for one in record.figures.values() if one.nearest]
    if not diagnosed:
        return ""
    shares = [one.error / one.nearest for one in diagnosed if one.nearest]
    plain = diagnosed[0].plain[:_LONGEST] or "rounding to nearest in the same grid"
    wider = _wider(record.forms)
    more = f" {wider} of {len(record.forms)} layers have more bits than most." if wider else ""
    return f"The median layer loses {median(shares):.0%} of what {plain} would.{more}"


def _wider(forms: Mapping[str, AppliedMethod]) -> int:
    bits = [form.bits for form in forms.values()]
    return sum(b > median(bits) for b in bits) if bits else 0


def _simulated(simulated: SimulatedLoss | None) -> str:
    if simulated is None:
        return ""
    kl = f"{simulated.kl:.4g}{_error(simulated.kl_error, '.2g')}"
    return f"KL {kl}, perplexity {simulated.perplexity:.3f}, {simulated.agreement:.1%} the same likeliest token"


def _loss(loss: Loss | None) -> dict[str, str] | None:
    if loss is None:
        return None
    change = f"{loss.perplexity / loss.source_perplexity - 1:+.2%}" if loss.source_perplexity else "?"
    return {
        "kl": f"{loss.kl:.4g}{_error(loss.kl_error, '.2g')}", "tokens": f"{loss.tokens:,}",
        "perplexity": f"{loss.perplexity:.3f}{_error(loss.perplexity_error, '.2f')}",
        "source": f"{loss.source_perplexity:.3f}", "change": change, "same": f"{loss.agreement:.1%}",
        "text": _text(loss), "precision": loss.precision[:_LONGEST], "simulated": _simulated(loss.fp8_activations),
    }  # fmt: skip


def _text(loss: Loss) -> str:
    if not loss.text:
        return "a text that was not recorded"
    return f"{'the bundled text' if loss.text == 'bundled' else 'a text of its own'} ({loss.digest[:_SHORT]})"


def _error(value: float | None, digits: str) -> str:
    return "" if value is None else f" ± {value:{digits}}"


def _measured(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the commands of measurements, by what they measured, except the command that made the folder."""
    for what, command in list(record.commands.items())[:_WORST]:
        if command != record.command:
            yield f"{what[:_LONGEST]} measured by", command


def _recipe(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in list(recipe.items())[:_MAX_ROWS]:
        if key == "layers" and isinstance(value, list):
            yield "exceptions", f"{len(value):,}, in compression.json"
        elif key not in ("name", "version"):
            yield key[:_LONGEST], str(value)[:_LONGEST]


def _speed(speed: Speeds | None) -> list[dict[str, str]]:
    def rate_text(rate: StepRate) -> str:
        return f"{rate.median:,.0f} ({rate.low:,.0f}-{rate.high:,.0f})"

    return [
        {
            "work": pace.work[:_LONGEST], "source": rate_text(pace.source), "made": rate_text(pace.made),
            "ratio": f"{pace.made.median / pace.source.median:.2f}" if pace.source.median else "",
        }
        for pace in (speed.paces[:_WORST] if speed else ())
    ]  # fmt: skip


def _mmlu(flips: AnswerChanges | None) -> dict[str, str] | None:
    if flips is None:
        return None

    def share(right: int, interval: tuple[float, float]) -> str:
        return f"{right / flips.questions:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"

    low, high = flips.interval
    return {
        "task": f"{flips.task[:_LONGEST]}, {flips.questions:,} questions"
                + (f" ({flips.digest[:_SHORT]})" if flips.digest else ""),
        "source": share(flips.source_right, flips.source_interval),
        "made": share(flips.made_right, flips.made_interval),
        "difference": f"{flips.difference:+.1%} ({low:+.1%} to {high:+.1%}), p {flips.p_value:.2g} (McNemar)",
        "flips": f"{flips.became_right} became right, {flips.became_wrong} wrong; "
                 f"{flips.chose_otherwise} chose otherwise",
    }  # fmt: skip


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.3%}" if share < 0.01 else f"{share:.2%}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
