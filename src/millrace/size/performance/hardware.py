"""What an instance runs on: a device of the catalogue, a slice of one (MIG), or this machine by its own roofline."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.engine.roofline_probe import roofline_here
from millrace.errors import ConfigError, sanitize
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import cpu_model, memory, usable_cores
from millrace.machine.devices import PROCESSOR, Device, Link, find_device
from millrace.machine.roofline import Roofline
from millrace.size.performance.operating_point import SYSTEM

THIS = "this"
_SLICE = re.compile(r"(.+?)[\s:/]+(\d)g(?:\.\d+gb)?", re.IGNORECASE)
_TIMES = re.compile(r"\s*(\d{1,2})\s*x\s*(\D.*?)\s*", re.IGNORECASE)
_HERE = re.compile(r"\b(cpus?|v?cores?|vms?|localhost)\b", re.IGNORECASE)
# Of 7 parts of the processors: parts of 8 of the memory, and how many such slices a device has.
_PARTS = {1: (1, 7), 2: (2, 3), 3: (4, 2), 4: (4, 1), 7: (8, 1)}
_SLICED = ("A100 SXM 40GB", "A100 SXM 80GB", "A100 PCIe 80GB", "H100 PCIe", "H100 SXM", "H100 NVL", "H200 SXM",
           "GH200 96GB", "B200", "GB200")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hardware:
    """device: as an instance sees it; whole: what is bought, of which it is one of `slices`

    system: such devices of a machine that is bought; most_tp: devices that work as one
    """

    device: Device
    whole: Device
    system: int
    slices: int = 1
    most_tp: int = 8


def find_hardware(name: str, system_size: int, here: Callable[[], Roofline]) -> Hardware:
    """raises ConfigError, where it can with the nearest name"""
    if name.casefold() == THIS:
        device = this_machine(here())
        return Hardware(device, device, 1, most_tp=1)
    return named_hardware(name, system_size)


def named_hardware(name: str, system_size: int = SYSTEM) -> Hardware:
    """All but this machine. raises ConfigError, where it can with the nearest name"""
    if found := _SLICE.fullmatch(name.strip()):
        return _slice(find_device(found[1]), int(found[2]), system_size)
    if found := _TIMES.fullmatch(name):
        device = find_device(found[2])
        raise ConfigError(f'hardware is "{sanitize(name)}"', "the name of one device",
                          f'--hardware "{device.name}" --system-size {found[1]}: systems of so many; '
                          "--systems 1 beside them, to know what one serves")  # fmt: skip
    if "," in name:
        raise ConfigError(f'hardware is "{sanitize(name)}"', "one name each",
                          " ".join(f'--hardware "{one.strip()}"' for one in sanitize(name).split(",")))  # fmt: skip
    if _HERE.search(name):
        raise ConfigError(f'no device is known as "{sanitize(name)}"', f"a GPU of the catalogue, or {THIS}",
                          f"--hardware {THIS}, on that machine: processors are measured")  # fmt: skip
    device = find_device(name)
    if not device.memory_bytes:
        raise ConfigError(f"{device.name} has what memory is put into its machine", f"a GPU, or {THIS}",
                          f"--hardware {THIS}, on that machine")  # fmt: skip
    return Hardware(device, device, system_size)


def _slice(whole: Device, parts: int, system_size: int) -> Hardware:
    """Slices share no links, so that each is an instance of its own."""
    if whole.name not in _SLICED:
        raise ConfigError(f"{whole.name} is not sliced here", ", ".join(_SLICED), "name the whole device")
    if parts not in _PARTS:
        raise ConfigError(f"a slice of {parts}g", ", ".join(f"{n}g" for n in _PARTS), "choose one of them")
    of_memory, slices = _PARTS[parts]
    device = replace(
        whole, name=f"{whole.name} {parts}g", memory_bytes=whole.memory_bytes * of_memory / 8,
        bandwidth=whole.bandwidth * of_memory / 8, peaks={name: p * parts / 7 for name, p in whole.peaks.items()},
        aliases=(),
    )  # fmt: skip
    return Hardware(device, whole, system_size * slices, slices, most_tp=1)


def this_machine(roofline: Roofline) -> Device:
    """Memory and reading from it as measured; bfloat16 and 8 bits at the rate of their instructions."""
    rates = {c.precision: (c.peak or c.all_threads).usual for c in roofline.compute}
    peaks = {name: rates[ours] for name, ours in (("bf16", "bf16"), ("int8", "w8a8")) if ours in rates}
    watts = 0  # nobody has measured it
    return Device(
        f"this machine ({cpu_model()}, {roofline.threads} threads)", PROCESSOR, memory().total_bytes,
        roofline.levels[-1].all_threads.usual, peaks, Link.PCIE, 0.0, watts,
    )  # fmt: skip


def measured_here() -> Roofline:
    """Takes some seconds."""
    return roofline_here(usable_isas()[0], usable_cores())
