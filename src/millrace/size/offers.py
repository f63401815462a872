"""Operating points to choose from: measured ones of these lengths, or computed ones; of calls in a row as one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millrace.errors import ConfigError, nearest
from millrace.machine.devices import Device, find_device
from millrace.size.cost import Instance
from millrace.size.lengths import Call, Work
from millrace.size.measured import read_points
from millrace.size.models import ModelShape, find_model
from millrace.size.plan import analytic_points, instance_of
from millrace.size.points import Point, Waits
from millrace.size.settings import HardwareSettings

USUAL = ("fp16", "bf16", "fp8")  # precisions to choose from, where nobody says
DEVICE = "H100"


@dataclass(frozen=True, slots=True)
class Offers:
    """points: of a request, all its calls together; model: None where it is only measured

    left_out: rows of a measured table that were not in a steady state
    """

    points: tuple[Point, ...]
    model: ModelShape | None
    devices: tuple[Device, ...]
    left_out: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of devices, each once."""
        return tuple(dict.fromkeys(point.device for point in self.points))

    def of(self, device: str) -> "Offers":
        """What that device does."""
        return replace(self, points=tuple(point for point in self.points if point.device == device))

    def instance(self, point: Point) -> Instance | None:
        if self.model is None:
            return None
        device = next((d for d in self.devices if d.name == point.device), None)
        return None if device is None else instance_of(self.model, device, point.precision, point.tp)


def offers(model: str | None, asked: HardwareSettings, work: Work) -> Offers:
    """raises ConfigError for what is not known, does not fit, or was not measured"""
    if asked.measured is not None:
        return _measured(model, asked, work)
    if model is None:
        raise ConfigError("no model is named", "a preset, or the path of a config.json", "name it: --model llama-3-8b")
    shape = find_model(model)
    work.check(shape)
    devices = tuple({(d := find_device(name)).name: d for name in asked.hardware or (DEVICE,)}.values())
    found = [
        point
        for device in devices
        for point in _calls(work, [_computed(shape, device, asked, call) for call in work.calls])
    ]
    points = tuple(_scaled(point, asked.factor) for point in found if asked.tp in (None, point.tp))
    if not points:
        raise ConfigError(f"{shape.name} does not fit on {asked.tp} x {' or '.join(d.name for d in devices)}",
                          "more devices", "leave --tp out")  # fmt: skip
    return Offers(points, shape, devices)


def _computed(shape: ModelShape, device: Device, asked: HardwareSettings, call: Call) -> list[Point]:
    known = [p for p in USUAL if p in device.peaks and not (p == "bf16" and "fp16" in device.peaks)]
    return analytic_points(shape, [device], asked.precision or known, call.lengths)


def _scaled(point: Point, factor: float) -> Point:
    """Every time is that many times as long."""
    if factor == 1:
        return point
    mean = Waits(point.mean.ttft_s * factor, point.mean.itl_s * factor, point.mean.e2e_s * factor)
    return replace(point, rate=point.rate / factor, mean=mean)


def _calls(work: Work, points: Sequence[Sequence[Point]]) -> list[Point]:
    """Of calls in a row on the same instances. points: of each call by itself, as though there were no other

    Each call takes its share of an instance's time, so that the times of a request add up, and Little's law holds. The
    first token that a user sees is the last call's.
    """
    if len(points) == 1:
        return list(points[0])
    by_place = [{(p.configuration, p.concurrency): p for p in some} for some in points]
    places = [place for place in by_place[0] if all(place in others for others in by_place)]
    return [_together([some[place] for some in by_place]) for place in places]


def _together(calls: Sequence[Point]) -> Point:
    def waits(of: Sequence[Waits]) -> Waits:
        waited = sum(w.e2e_s for w in of[:-1])
        return Waits(waited + of[-1].ttft_s, of[-1].itl_s, waited + of[-1].e2e_s)

    seconds = [1 / point.rate for point in calls]
    total = sum(seconds)
    known = [point.p95 for point in calls if point.p95 is not None]
    return replace(
        calls[-1], rate=1 / total, mean=waits([point.mean for point in calls]),
        p95=waits(known) if len(known) == len(calls) else None,
        input_tokens=sum(p.input_tokens * s for p, s in zip(calls, seconds, strict=True)) / total,
        output_tokens=sum(p.output_tokens * s for p, s in zip(calls, seconds, strict=True)) / total,
    )  # fmt: skip


def _measured(model: str | None, asked: HardwareSettings, work: Work) -> Offers:
    if asked.factor != 1:
        raise ConfigError("--factor with measurements", "one of them", "leave --factor out: measured is measured")
    assert asked.measured is not None
    points, left_out = read_points(Path(asked.measured))
    points = _of_model(points, model, asked.measured)
    points = _on_hardware(points, asked)
    found = _calls(work, [_of_call(points, call, asked.measured) for call in work.calls])
    if not found:
        raise ConfigError(f"{asked.measured} has no configuration with all {len(work.calls)} calls",
                          "the same configurations and concurrencies for each", "measure them")  # fmt: skip
    shape = None
    if model is not None:
        try:
            shape = find_model(model)
        except ConfigError:
            shape = None  # what was measured needs no shape; memory is not told then
    return Offers(tuple(found), shape, (), left_out)


def _of_model(points: Sequence[Point], model: str | None, path: str) -> list[Point]:
    names = sorted({point.model for point in points})
    if model is None:
        if len(names) > 1:
            raise ConfigError(f"{path} has measurements of {len(names)} models", ", ".join(names[:12]),
                              "name one with --model")  # fmt: skip
        return list(points)
    found = [point for point in points if point.model.casefold() == model.casefold()]
    if not found:
        raise ConfigError(f"{path} has no measurements of {model}", nearest(model, names), "correct --model")
    return found


def _on_hardware(points: Sequence[Point], asked: HardwareSettings) -> list[Point]:
    wanted = {_device_name(name) for name in asked.hardware}
    found = [point for point in points if not wanted or _device_name(point.device) in wanted]
    if not found:
        raise ConfigError(f"nothing was measured on {' or '.join(asked.hardware)}",
                          ", ".join(sorted({point.device for point in points})[:12]), "correct --hardware")  # fmt: skip
    kept = [p for p in found if not asked.precision or p.precision in asked.precision]
    kept = [p for p in kept if asked.tp in (None, p.tp)]
    if not kept:
        told = sorted({f"{p.precision} TP{p.tp}" for p in found})
        raise ConfigError("nothing was measured in this precision and TP", ", ".join(told[:16]), "choose one of them")
    return kept


def _device_name(name: str) -> str:
    """One of the catalogue where it is in it, so that names of nvidia-smi and of people meet."""
    try:
        return find_device(name).name
    except ConfigError:
        return name.casefold()


def _of_call(points: Sequence[Point], call: Call, path: str) -> list[Point]:
    found = [p for p in points if (p.input_tokens, p.output_tokens) == call.lengths]
    if not found:
        told = sorted({(p.input_tokens, p.output_tokens) for p in points})
        raise ConfigError(
            f"{path} has no measurements of {call.n_input:,.0f} tokens in and {call.n_output:,.0f} out",
            "lengths that were measured: " + ", ".join(f"{a:g}/{b:g}" for a, b in told[:12]),
            "choose such lengths, measure these, or leave --measured out",
        )  # fmt: skip
    return found
