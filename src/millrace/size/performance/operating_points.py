"""Candidate operating points of a request: measured, computed, or from a profiled server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from millrace.errors import ConfigError, nearest
from millrace.machine.devices import DEVICES, Device, find_device
from millrace.machine.roofline import Roofline
from millrace.runtime.scheduling.step_cost_model import read_profile
from millrace.size.answer.sizing import TPS, Computed, EvidenceBasis, instance_of
from millrace.size.fit.overhead_file import FittedStack, read_stack
from millrace.size.load.sequential_calls import chain_calls
from millrace.size.load.token_lengths import ModelCall, RequestWork
from millrace.size.performance.closed_form import CONCURRENCIES, estimate_point
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.hardware import THIS, Hardware, find_hardware, measured_here
from millrace.size.performance.measured_points import read_points
from millrace.size.performance.models import PRESETS, ModelShape, find_model
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits
from millrace.size.performance.roofline_cost import WEIGHT_BYTES, ModelInstance
from millrace.size.question.settings import HardwareSettings
from millrace.size.simulation.measured_steps import ProfiledServer

DEVICE, ALL = "H100", "all"


@dataclass(frozen=True, slots=True)
class Offers:
    """Candidate points of whole requests. model: None if only measurements are known

    left_out: rows of a measured table that were not in a steady state; own: a stack fitted to the user's runs
    profiled: a server of this machine with measured steps; refused: requested devices that cannot be used, with reasons
    """

    points: tuple[OperatingPoint, ...]
    model: ModelShape | None
    hardware: tuple[Hardware, ...]
    left_out: int = 0
    own: FittedStack | None = None
    profiled: ProfiledServer | None = None
    refused: Mapping[str, ConfigError] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the devices, each once."""
        return tuple(dict.fromkeys(point.device for point in self.points))

    @property
    def computed(self) -> "Offers":
        """Return the offers without simulated points."""
        return replace(self, points=tuple(p for p in self.points if p.source != FigureSource.SIMULATED))

    def for_device(self, device: str) -> "Offers":
        """Return the offers of one device."""
        return replace(self, points=tuple(point for point in self.points if point.device == device))

    def hardware_for(self, device: str) -> Hardware | None:
        """Return the hardware of a device; None if it is not in the catalogue."""
        return next((hardware for hardware in self.hardware if hardware.device.name == device), None)

    @property
    def basis(self) -> EvidenceBasis | None:
        """Return the basis of computed points, for the first device; None if all points are measured."""
        if self.profiled is not None:
            return self.profiled
        instance = self.instance(self.points[0]) if self.points else None
        return None if instance is None else Computed(instance, self.own)

    def instance(self, point: OperatingPoint) -> ModelInstance | None:
        hardware = self.hardware_for(point.device)
        if self.model is None or hardware is None or point.precision not in WEIGHT_BYTES:
            return None
        return instance_of(self.model, hardware.device, point.precision, point.tp, point.pp, point.system)


def offers(
    model: str | None,
    settings: HardwareSettings,
    work: RequestWork,
    local_roofline: Callable[[], Roofline] = measured_here,
) -> Offers:
    """Return the candidates for a model and hardware. raises ConfigError if something is unknown, does not fit, or was
    not measured"""
    if settings.measured is not None:
        return _measured_offers(model, settings, work)
    if settings.profile is not None:
        return _profiled_offers(model, settings, work)
    if model is None:
        raise ConfigError("no model is named", "a preset, or the path of a config.json", "name it: --model llama-3-8b")
    shape = find_model(model)
    work.check(shape)
    names = settings.hardware or (DEVICE,)
    if is_all := any(name.casefold() == ALL for name in names):
        if len(names) > 1:
            raise ConfigError(f'--hardware {ALL} beside {" and ".join(n for n in names if n.casefold() != ALL)}',
                              "one of both", "leave one out")  # fmt: skip
        names = tuple(entry.name for entry in DEVICES if "fp16" in entry.peaks)  # excludes CPUs
    selected = [find_hardware(name, settings.system_size, local_roofline) for name in names]
    hardware = tuple({entry.device.name: entry for entry in selected}.values())
    own = None if settings.stack is None else read_stack(Path(settings.stack))
    if own is not None and own.device not in [entry.device.name for entry in hardware]:
        raise ConfigError(f"{settings.stack} is of {own.device}", " or ".join(entry.device.name for entry in hardware),
                          f"name that hardware, or fit a stack of it: --hardware {own.device!r}")  # fmt: skip
    if own is not None and settings.precision and own.precision not in settings.precision:
        raise ConfigError(f"{settings.stack} is of {own.precision}", " or ".join(settings.precision),
                          f"choose that precision: --precision {own.precision}")  # fmt: skip
    points: list[OperatingPoint] = []
    refused: dict[str, ConfigError] = {}
    for entry in hardware:
        try:
            points += _computed_points(shape, entry, settings, work, own)
        except ConfigError as error:
            refused[entry.device.name] = error
    if not points:
        raise next(iter(refused.values()))
    return Offers(tuple(points), shape, hardware, own=own, refused={} if is_all else refused)


def _computed_points(
    shape: ModelShape, hardware: Hardware, settings: HardwareSettings, work: RequestWork, own: FittedStack | None
) -> list[OperatingPoint]:  # fmt: skip
    if settings.pp not in (None, 1) and hardware.max_tp == 1:
        raise ConfigError(f"--pp {settings.pp} on {hardware.device.name}, which is linked to no other", "--pp 1",
                          "leave --pp out, or name whole devices")  # fmt: skip
    points = chain_calls([_single_call_points(shape, hardware, settings, call, own) for call in work.calls])
    max_tp, fits = min(hardware.max_tp, hardware.system), sorted({p.tp for p in points})
    usable = [p for p in points if p.tp <= max_tp and settings.tp in (None, p.tp)]
    usable = [
        p for p in usable if p.devices <= hardware.system or p.devices % hardware.system == 0
    ]  # whole systems beyond one
    if not usable:
        if settings.tp is not None and settings.tp > max_tp:
            raise ConfigError(f"TP{settings.tp} on {hardware.device.name}, of which a system has {max_tp}",
                              f"--tp {max_tp} at most", "leave --tp out, or take larger systems")  # fmt: skip
        raise ConfigError(
            f"{shape.name} does not fit on {settings.tp or max_tp} x {hardware.device.name}",
            "TP " + ", ".join(map(str, fits)),
            "take larger devices, or fewer bits; leave --tp out",
        )
    return [replace(scale_times(point, settings.factor), system=hardware.system) for point in usable]


def _single_call_points(
    shape: ModelShape, hardware: Hardware, settings: HardwareSettings, call: ModelCall, own: FittedStack | None
) -> list[OperatingPoint]:  # fmt: skip
    """Return the closed-form points of one call alone. raises ConfigError if nothing fits"""
    points: list[OperatingPoint] = []
    failure: ConfigError | None = None
    device, pp = hardware.device, settings.pp or 1
    usual = _precisions(device) if own is None or own.device != device.name else [own.precision]
    for precision, tp in product(settings.precision or usual, TPS):
        stack = own.stack_for(device.name, precision) if own else None
        try:
            instance, device_profile = (
                instance_of(shape, device, precision, tp, pp, hardware.system),
                profile(device, precision),
            )
            points += [estimate_point(instance, device_profile, call.lengths, n, stack) for n in CONCURRENCIES]
        except ConfigError as error:
            failure = error
    if not points:
        assert failure is not None, "there is a precision"
        raise failure
    return points


def _profiled_offers(model: str | None, settings: HardwareSettings, work: RequestWork) -> Offers:
    """Return the candidates of a profiled server. raises ConfigError for another machine or model, or extra flags"""
    assert settings.profile is not None
    profile = read_profile(Path(settings.profile))
    if [name.casefold() for name in settings.hardware] != [THIS]:
        raise ConfigError(f"--profile with {' and '.join(settings.hardware) or 'no hardware'}", f"--hardware {THIS}",
                          "name this machine, whose steps they are")  # fmt: skip
    for name, value in (("stack", settings.stack), ("precision", settings.precision), ("tp", settings.tp)):
        if value:
            raise ConfigError(f"--{name} beside --profile", "the engine as it was profiled", f"leave --{name} out")
    if model is not None and model.casefold() != profile.model.casefold():
        raise ConfigError(f"the profile is of {profile.model}", f"--model {profile.model}, or none",
                          "leave --model out, or fit a profile of that model")  # fmt: skip
    own = ProfiledServer(profile)
    own.check()
    work.check_context(profile.schedule.context_tokens, f"the server of {settings.profile}",
                       "fit a profile of a server with more")  # fmt: skip
    points = chain_calls([own.points(call) for call in work.calls])
    return Offers(tuple(scale_times(point, settings.factor) for point in points), None, (), profiled=own)


def _precisions(device: Device) -> list[str]:
    """Return the default precisions of a device: 16 bits, and 8 bits if it has them."""
    wide = "fp16" if "fp16" in device.peaks else "bf16"
    narrow = "fp8" if "fp8" in device.peaks else "int8" if wide == "bf16" else None  # processors have int8 alone
    return [wide, *([narrow] if narrow in device.peaks else [])] if narrow else [wide]


def scale_times(point: OperatingPoint, factor: float) -> OperatingPoint:
    """Return the point with all times multiplied by a factor."""
    if factor == 1:
        return point

    def longer(waits: Waits) -> Waits:
        return Waits(waits.ttft_s * factor, waits.itl_s * factor, waits.e2e_s * factor)

    sampled = point.sampled
    if sampled is not None:
        sampled = replace(sampled, p99=longer(sampled.p99), mean_within=longer(sampled.mean_within),
                          p95_within=longer(sampled.p95_within))  # fmt: skip
    return replace(
        point, rate=point.rate / factor, mean=longer(point.mean), p95=longer(point.p95) if point.p95 else None,
        sampled=sampled,
    )  # fmt: skip


def _measured_offers(model: str | None, settings: HardwareSettings, work: RequestWork) -> Offers:
    for name, value in (("stack", settings.stack), ("profile", settings.profile)):
        if value is not None:
            raise ConfigError(f"--{name} with measurements", "one of them", "leave one out")
    if settings.factor != 1:
        raise ConfigError("--factor with measurements", "one of them", "leave --factor out: measured is measured")
    assert settings.measured is not None
    shape = _shape(model)
    known_as = PRESETS if model is None or shape is None else {**PRESETS, model.casefold(): shape}
    points, left_out = read_points(Path(settings.measured), known_as)
    points = _of_model(points, model, settings.measured)
    points = _on_hardware(points, settings)
    combined = chain_calls([_of_call(points, call, settings.measured) for call in work.calls])
    if not combined:
        raise ConfigError(f"{settings.measured} has no configuration with all {len(work.calls)} calls",
                          "the same configurations and concurrencies for each", "measure them")  # fmt: skip
    combined = [replace(point, system=settings.system_size) for point in combined]
    devices = [device for name in {p.device: 0 for p in combined} if (device := _catalogue_device(name)) is not None]
    # Named as in the table, because points are looked up by that name.
    hardware = tuple(Hardware(replace(d, name=n), d, settings.system_size) for n, d in devices)
    return Offers(tuple(combined), shape, hardware, left_out)


def _shape(model: str | None) -> ModelShape | None:
    """Return the shape of a model; None if unknown: then memory is not reported and rows are not checked."""
    try:
        return None if model is None else find_model(model)
    except ConfigError:
        return None


def _catalogue_device(name: str) -> tuple[str, Device] | None:
    try:
        return name, find_device(name)
    except ConfigError:
        return None


def _of_model(points: Sequence[OperatingPoint], model: str | None, path: str) -> list[OperatingPoint]:
    names = sorted({point.model for point in points})
    if model is None:
        if len(names) > 1:
            raise ConfigError(f"{path} has measurements of {len(names)} models", ", ".join(names[:12]),
                              "name one with --model")  # fmt: skip
        return list(points)
    matching = [point for point in points if point.model.casefold() == model.casefold()]
    if not matching:
        raise ConfigError(f"{path} has no measurements of {model}", nearest(model, names), "correct --model")
    return matching


def _on_hardware(points: Sequence[OperatingPoint], settings: HardwareSettings) -> list[OperatingPoint]:
    names = {_device_name(name) for name in settings.hardware}
    matching = [point for point in points if not names or _device_name(point.device) in names]
    if not matching:
        raise ConfigError(f"nothing was measured on {' or '.join(settings.hardware)}",
                          ", ".join(sorted({point.device for point in points})[:12]), "correct --hardware")  # fmt: skip
    usable = [p for p in matching if not settings.precision or p.precision in settings.precision]
    usable = [p for p in usable if settings.tp in (None, p.tp)]
    if not usable:
        choices = sorted({f"{p.precision} TP{p.tp}" for p in matching})
        raise ConfigError(
            "nothing was measured in this precision and TP", ", ".join(choices[:16]), "choose one of them"
        )
    return usable


def _device_name(name: str) -> str:
    """Return the catalogue name if there is one, so that names from nvidia-smi match those of users."""
    try:
        return find_device(name).name
    except ConfigError:
        return name.casefold()


def _of_call(points: Sequence[OperatingPoint], call: ModelCall, path: str) -> list[OperatingPoint]:
    matching = [p for p in points if (p.input_tokens, p.output_tokens) == call.lengths]
    if not matching:
        measured_lengths = sorted({(p.input_tokens, p.output_tokens) for p in points})
        raise ConfigError(
            f"{path} has no measurements of {call.n_input:,.0f} tokens in and {call.n_output:,.0f} out",
            "lengths that were measured: " + ", ".join(f"{a:.10g}/{b:.10g}" for a, b in measured_lengths[:12]),
            "choose such lengths, measure these, or leave --measured out",
        )  # fmt: skip
    return matching
