"""Operating points to choose from: measured ones of these lengths, or computed ones; of calls in a row as one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from millrace.errors import ConfigError, nearest
from millrace.machine.devices import DEVICES, Device, find_device
from millrace.machine.roofline import Roofline
from millrace.runtime.scheduling.step_cost_model import read_profile
from millrace.size.answer.sizing import TPS, Computed, EvidenceBasis, instance_of
from millrace.size.fit.overhead_file import OwnStack, read_stack
from millrace.size.load.sequential_calls import chain_calls
from millrace.size.load.token_lengths import Call, Work
from millrace.size.performance.closed_form import CONCURRENCIES, served
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.hardware import THIS, Hardware, find_hardware, measured_here
from millrace.size.performance.measured_points import read_points
from millrace.size.performance.models import PRESETS, ModelShape, find_model
from millrace.size.performance.operating_point import Point, Source, Waits
from millrace.size.performance.roofline_cost import WEIGHT_BYTES, Instance
from millrace.size.question.settings import HardwareSettings
from millrace.size.simulation.measured_steps import Profiled

DEVICE, ALL = "H100", "all"


@dataclass(frozen=True, slots=True)
class Offers:
    """points: of a request, all its calls together; model: None where it is only measured

    left_out: rows of a measured table that were not in a steady state; own: a stack that was fitted to a user's runs
    profiled: a server of this machine, by its steps; refused: devices that were named, and do not do
    """

    points: tuple[Point, ...]
    model: ModelShape | None
    hardware: tuple[Hardware, ...]
    left_out: int = 0
    own: OwnStack | None = None
    profiled: Profiled | None = None
    refused: Mapping[str, ConfigError] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Of devices, each once."""
        return tuple(dict.fromkeys(point.device for point in self.points))

    @property
    def computed(self) -> "Offers":
        """Without what was simulated."""
        return replace(self, points=tuple(p for p in self.points if p.source != Source.SIMULATED))

    def of(self, device: str) -> "Offers":
        """What that device does."""
        return replace(self, points=tuple(point for point in self.points if point.device == device))

    def bought(self, device: str) -> Hardware | None:
        """None: measured on what the catalogue has not."""
        return next((one for one in self.hardware if one.device.name == device), None)

    @property
    def basis(self) -> EvidenceBasis | None:
        """What is computed of its first device; None where all is measured."""
        if self.profiled is not None:
            return self.profiled
        instance = self.instance(self.points[0]) if self.points else None
        return None if instance is None else Computed(instance, self.own)

    def instance(self, point: Point) -> Instance | None:
        found = self.bought(point.device)
        if self.model is None or found is None or point.precision not in WEIGHT_BYTES:
            return None
        return instance_of(self.model, found.device, point.precision, point.tp, point.pp, point.system)


def offers(
    model: str | None, asked: HardwareSettings, work: Work, here: Callable[[], Roofline] = measured_here
) -> Offers:  # fmt: skip
    """here: this machine's roofline. raises ConfigError for what is not known, does not fit, or was not measured"""
    if asked.measured is not None:
        return _measured(model, asked, work)
    if asked.profile is not None:
        return _profiled(model, asked, work)
    if model is None:
        raise ConfigError("no model is named", "a preset, or the path of a config.json", "name it: --model llama-3-8b")
    shape = find_model(model)
    work.check(shape)
    names = asked.hardware or (DEVICE,)
    if is_all := any(name.casefold() == ALL for name in names):
        if len(names) > 1:
            raise ConfigError(f'--hardware {ALL} beside {" and ".join(n for n in names if n.casefold() != ALL)}',
                              "one of both", "leave one out")  # fmt: skip
        names = tuple(one.name for one in DEVICES if "fp16" in one.peaks)  # processors have none
    named = [find_hardware(name, asked.system_size, here) for name in names]
    hardware = tuple({one.device.name: one for one in named}.values())
    own = None if asked.stack is None else read_stack(Path(asked.stack))
    if own is not None and own.device not in [one.device.name for one in hardware]:
        raise ConfigError(f"{asked.stack} is of {own.device}", " or ".join(one.device.name for one in hardware),
                          f"name that hardware, or fit a stack of it: --hardware {own.device!r}")  # fmt: skip
    if own is not None and asked.precision and own.precision not in asked.precision:
        raise ConfigError(f"{asked.stack} is of {own.precision}", " or ".join(asked.precision),
                          f"choose that precision: --precision {own.precision}")  # fmt: skip
    points: list[Point] = []
    refused: dict[str, ConfigError] = {}
    for one in hardware:
        try:
            points += _computed(shape, one, asked, work, own)
        except ConfigError as error:
            refused[one.device.name] = error
    if not points:
        raise next(iter(refused.values()))
    return Offers(tuple(points), shape, hardware, own=own, refused={} if is_all else refused)


def _computed(
    shape: ModelShape, one: Hardware, asked: HardwareSettings, work: Work, own: OwnStack | None
) -> list[Point]:  # fmt: skip
    if asked.pp not in (None, 1) and one.most_tp == 1:
        raise ConfigError(f"--pp {asked.pp} on {one.device.name}, which is linked to no other", "--pp 1",
                          "leave --pp out, or name whole devices")  # fmt: skip
    found = chain_calls([_alone(shape, one, asked, call, own) for call in work.calls])
    most, fits = min(one.most_tp, one.system), sorted({p.tp for p in found})
    kept = [p for p in found if p.tp <= most and asked.tp in (None, p.tp)]
    kept = [p for p in kept if p.devices <= one.system or p.devices % one.system == 0]  # whole systems beyond one
    if not kept:
        if asked.tp is not None and asked.tp > most:
            raise ConfigError(f"TP{asked.tp} on {one.device.name}, of which a system has {most}",
                              f"--tp {most} at most", "leave --tp out, or take larger systems")  # fmt: skip
        raise ConfigError(
            f"{shape.name} does not fit on {asked.tp or most} x {one.device.name}", "TP " + ", ".join(map(str, fits)),
            "take larger devices, or fewer bits; leave --tp out",
        )  # fmt: skip
    return [replace(scaled(point, asked.factor), system=one.system) for point in kept]


def _alone(
    shape: ModelShape, one: Hardware, asked: HardwareSettings, call: Call, own: OwnStack | None
) -> list[Point]:  # fmt: skip
    """Of a call by itself, in closed form. raises ConfigError where nothing fits"""
    found: list[Point] = []
    why: ConfigError | None = None
    device, pp = one.device, asked.pp or 1
    usual = _precisions(device) if own is None or own.device != device.name else [own.precision]  # all that it tells of
    for precision, tp in product(asked.precision or usual, TPS):
        stack = own.of(device.name, precision) if own else None
        try:
            instance, known = instance_of(shape, device, precision, tp, pp, one.system), profile(device, precision)
            found += [served(instance, known, call.lengths, n, stack) for n in CONCURRENCIES]
        except ConfigError as error:
            why = error
    if not found:
        assert why is not None, "there is a precision"
        raise why
    return found


def _profiled(model: str | None, asked: HardwareSettings, work: Work) -> Offers:
    """raises ConfigError for another machine or model, and beside what a profile leaves nothing to say of"""
    assert asked.profile is not None
    profile = read_profile(Path(asked.profile))
    if [name.casefold() for name in asked.hardware] != [THIS]:
        raise ConfigError(f"--profile with {' and '.join(asked.hardware) or 'no hardware'}", f"--hardware {THIS}",
                          "name this machine, whose steps they are")  # fmt: skip
    for name, beside in (("stack", asked.stack), ("precision", asked.precision), ("tp", asked.tp)):
        if beside:
            raise ConfigError(f"--{name} beside --profile", "the engine as it was profiled", f"leave --{name} out")
    if model is not None and model.casefold() != profile.model.casefold():
        raise ConfigError(f"the profile is of {profile.model}", f"--model {profile.model}, or none",
                          "leave --model out, or fit a profile of that model")  # fmt: skip
    own = Profiled(profile)
    own.check()
    work.check_context(profile.schedule.context_tokens, f"the server of {asked.profile}",
                       "fit a profile of a server with more")  # fmt: skip
    points = chain_calls([own.points(call) for call in work.calls])
    return Offers(tuple(scaled(point, asked.factor) for point in points), None, (), profiled=own)


def _precisions(device: Device) -> list[str]:
    """16 bits and 8, as the device has them."""
    wide = "fp16" if "fp16" in device.peaks else "bf16"
    narrow = "fp8" if "fp8" in device.peaks else "int8" if wide == "bf16" else None  # processors have int8 alone
    return [wide, *([narrow] if narrow in device.peaks else [])] if narrow else [wide]


def scaled(point: Point, factor: float) -> Point:
    """Every time is that many times as long."""
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


def _measured(model: str | None, asked: HardwareSettings, work: Work) -> Offers:
    for name, beside in (("stack", asked.stack), ("profile", asked.profile)):
        if beside is not None:
            raise ConfigError(f"--{name} with measurements", "one of them", "leave one out")
    if asked.factor != 1:
        raise ConfigError("--factor with measurements", "one of them", "leave --factor out: measured is measured")
    assert asked.measured is not None
    shape = _shape(model)
    known_as = PRESETS if model is None or shape is None else {**PRESETS, model.casefold(): shape}
    points, left_out = read_points(Path(asked.measured), known_as)
    points = _of_model(points, model, asked.measured)
    points = _on_hardware(points, asked)
    found = chain_calls([_of_call(points, call, asked.measured) for call in work.calls])
    if not found:
        raise ConfigError(f"{asked.measured} has no configuration with all {len(work.calls)} calls",
                          "the same configurations and concurrencies for each", "measure them")  # fmt: skip
    found = [replace(point, system=asked.system_size) for point in found]
    known = [device for name in {p.device: 0 for p in found} if (device := _known(name)) is not None]
    # By the name that the table has: under it the points are found.
    hardware = tuple(Hardware(replace(d, name=n), d, asked.system_size) for n, d in known)
    return Offers(tuple(found), shape, hardware, left_out)


def _shape(model: str | None) -> ModelShape | None:
    """What was measured needs none; memory is not told then, and no row is judged."""
    try:
        return None if model is None else find_model(model)
    except ConfigError:
        return None


def _known(name: str) -> tuple[str, Device] | None:
    try:
        return name, find_device(name)
    except ConfigError:
        return None


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
            "lengths that were measured: " + ", ".join(f"{a:.10g}/{b:.10g}" for a, b in told[:12]),
            "choose such lengths, measure these, or leave --measured out",
        )  # fmt: skip
    return found
