"""Hardware of an instance: a device of the catalogue, a MIG slice of one, or this machine with its measured
roofline."""

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
# Compute slices (of 7) -> memory slices (of 8), and how many such instances fit on a device.
_PARTS = {1: (1, 7), 2: (2, 3), 3: (4, 2), 4: (4, 1), 7: (8, 1)}
_SLICED = ("A100 SXM 40GB", "A100 SXM 80GB", "A100 PCIe 80GB", "H100 PCIe", "H100 SXM", "H100 NVL", "H200 SXM",
           "GH200 96GB", "B200", "GB200")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hardware:
    """device: as an instance sees it; physical_device: what is bought; the device is one of its `slices`

    system: devices of a system; max_tp: devices that can share a layer
    """

    device: Device
    physical_device: Device
    system: int
    slices: int = 1
    max_tp: int = 8


def find_hardware(name: str, system_size: int, local_roofline: Callable[[], Roofline]) -> Hardware:
    """Find a device, a slice or this machine by name. raises ConfigError, with the nearest name if there is one"""
    if name.casefold() == THIS:
        device = this_machine(local_roofline())
        return Hardware(device, device, 1, max_tp=1)
    return named_hardware(name, system_size)


def named_hardware(name: str, system_size: int = SYSTEM) -> Hardware:
    """Find a device or a slice of one by name. raises ConfigError, with the nearest name if there is one"""
    if match := _SLICE.fullmatch(name.strip()):
        return _slice(find_device(match[1]), int(match[2]), system_size)
    if match := _TIMES.fullmatch(name):
        device = find_device(match[2])
        raise ConfigError(f'hardware is "{sanitize(name)}"', "the name of one device",
                          f'--hardware "{device.name}" --system-size {match[1]}: systems of this size; '
                          "--systems 1 beside them, to know what one serves")  # fmt: skip
    if "," in name:
        raise ConfigError(f'hardware is "{sanitize(name)}"', "one name each",
                          " ".join(f'--hardware "{part.strip()}"' for part in sanitize(name).split(",")))  # fmt: skip
    if _HERE.search(name):
        raise ConfigError(f'no device is known as "{sanitize(name)}"', f"a GPU of the catalogue, or {THIS}",
                          f"--hardware {THIS}, on that machine: processors are measured")  # fmt: skip
    device = find_device(name)
    if not device.memory_bytes:
        raise ConfigError(f"{device.name} has what memory is put into its machine", f"a GPU, or {THIS}",
                          f"--hardware {THIS}, on that machine")  # fmt: skip
    return Hardware(device, device, system_size)


def _slice(physical_device: Device, parts: int, system_size: int) -> Hardware:
    """Return a MIG slice; slices share no links, so each is an instance of its own."""
    if physical_device.name not in _SLICED:
        raise ConfigError(f"{physical_device.name} is not sliced here", ", ".join(_SLICED), "name the whole device")
    if parts not in _PARTS:
        raise ConfigError(f"a slice of {parts}g", ", ".join(f"{n}g" for n in _PARTS), "choose one of them")
    of_memory, slices = _PARTS[parts]
    device = replace(
        physical_device,
        name=f"{physical_device.name} {parts}g",
        memory_bytes=physical_device.memory_bytes * of_memory / 8,
        bandwidth=physical_device.bandwidth * of_memory / 8,
        peaks={name: p * parts / 7 for name, p in physical_device.peaks.items()},
        aliases=(),
    )
    return Hardware(device, physical_device, system_size * slices, slices, max_tp=1)


def this_machine(roofline: Roofline) -> Device:
    """Describe this machine as a device: measured memory bandwidth, and instruction rates of bfloat16 and int8."""
    rates = {c.precision: (c.peak or c.all_threads).usual for c in roofline.compute}
    peaks = {name: rates[ours] for name, ours in (("bf16", "bf16"), ("int8", "w8a8")) if ours in rates}
    watts = 0  # not measured
    return Device(
        f"this machine ({cpu_model()}, {roofline.threads} threads)", PROCESSOR, memory().total_bytes,
        roofline.levels[-1].all_threads.usual, peaks, Link.PCIE, 0.0, watts,
    )  # fmt: skip


def measured_here() -> Roofline:
    """Measure the roofline of this machine, which takes some seconds."""
    return roofline_here(usable_isas()[0], usable_cores())
