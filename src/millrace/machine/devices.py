"""Specifications of accelerators and processors by their vendors, and the precisions that they multiply.

What a local NVIDIA GPU multiplies follows from the architecture of its compute capability.

Peaks are dense: vendors' pages and most tables on the web quote twice as much, for 2:4 sparse weights. Sources: the
vendors' datasheets.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from millrace.errors import ConfigError, nearest

PROCESSOR = "CPU"  # the architecture of a machine without accelerators
GB, TERA = 1e9, 1e12  # decimal, as memory and peaks are advertised


class Link(StrEnum):
    """How the devices of one machine are connected."""

    SWITCH = "switch"  # all to all, at full rate
    BRIDGE = "bridge"  # in pairs; between pairs over PCIe
    PCIE = "pcie"


@dataclass(frozen=True, slots=True)
class Device:
    """memory in bytes (0: depends on the machine); rates in bytes and operations per second

    peaks: dense, by precision ("fp16", "bf16", "fp8", "int8", "fp4"); other precisions have no native multiplication
    link_rate: of all links of a device together, in both directions
    """

    name: str
    architecture: str
    memory_bytes: float
    bandwidth: float
    peaks: Mapping[str, float]
    link: Link
    link_rate: float
    watts: int
    aliases: tuple[str, ...] = ()

    def peak(self, precision: str) -> float:
        """Return the peak of a precision. raises ConfigError if the device does not multiply it"""
        if precision not in self.peaks:
            raise ConfigError(
                f"{self.name} ({self.architecture}) does not multiply {precision}",
                "one of " + ", ".join(self.peaks),
                "choose another precision, or another device",
            )
        return self.peaks[precision]


def _device(
    name: str, architecture: str, memory_gb: float, gb_s: float, tera: tuple[float, ...], link: tuple[Link, float],
    watts: int, *aliases: str,
) -> Device:  # fmt: skip
    """tera: 10^12 operations/s of fp16, bf16, int8, fp8, fp4, as far as it has them; 0: it lacks that one"""
    peaks = {p: t * TERA for p, t in zip(("fp16", "bf16", "int8", "fp8", "fp4"), tera, strict=False) if t}
    kind, rate = link
    return Device(
        name, architecture, memory_gb * GB, gb_s * GB, MappingProxyType(peaks), kind, rate * GB, watts, aliases
    )


_S, _B, _P = Link.SWITCH, Link.BRIDGE, Link.PCIE
DEVICES = (
    _device("T4", "Turing", 16, 320, (65, 0, 130), (_P, 32), 70, "Tesla T4"),
    _device("V100 SXM2 32GB", "Volta", 32, 900, (125,), (_S, 300), 300, "V100", "Tesla V100-SXM2-32GB"),
    _device("A10", "Ampere", 24, 600, (125, 125, 250), (_P, 64), 150, "NVIDIA A10"),
    _device("A10G", "Ampere", 24, 600, (70, 70, 140), (_P, 64), 300, "NVIDIA A10G"),
    _device("A30", "Ampere", 24, 933, (165, 165, 330), (_B, 200), 165, "NVIDIA A30"),
    _device("A40", "Ampere", 48, 696, (149.7, 149.7, 299.3), (_B, 112.5), 300, "NVIDIA A40"),
    _device("A100 SXM 40GB", "Ampere", 40, 1555, (312, 312, 624), (_S, 600), 400, "A100-SXM4-40GB"),
    _device("A100 SXM 80GB", "Ampere", 80, 2039, (312, 312, 624), (_S, 600), 400, "A100", "A100-SXM4-80GB"),
    _device("A100 PCIe 80GB", "Ampere", 80, 1935, (312, 312, 624), (_B, 600), 300, "A100 80GB PCIe"),
    _device("L4", "Ada", 24, 300, (121, 121, 242, 242), (_P, 64), 72, "NVIDIA L4"),
    _device("L40", "Ada", 48, 864, (181, 181, 362, 362), (_P, 64), 300, "NVIDIA L40"),
    _device("L40S", "Ada", 48, 864, (362, 362, 733, 733), (_P, 64), 350, "NVIDIA L40S"),
    _device("RTX 4090", "Ada", 24, 1008, (165.2, 165.2, 660.6, 330.3), (_P, 64), 450, "GeForce RTX 4090"),
    _device("RTX 6000 Pro Blackwell SE", "Blackwell", 96, 1597, (500, 500, 1000, 1000, 2000), (_P, 128), 600),
    _device("H100 PCIe", "Hopper", 80, 2000, (756, 756, 1513, 1513), (_B, 600), 350, "H100 PCIe 80GB"),
    _device("H100 SXM", "Hopper", 80, 3350, (989, 989, 1979, 1979), (_S, 900), 700, "H100", "H100 80GB HBM3"),
    _device("H100 NVL", "Hopper", 94, 3900, (835, 835, 1671, 1671), (_B, 600), 400),
    _device("H200 SXM", "Hopper", 141, 4800, (989, 989, 1979, 1979), (_S, 900), 700, "H200", "H200 141GB HBM3"),
    _device("GH200 96GB", "Hopper", 96, 4000, (989, 989, 1979, 1979), (_S, 900), 1000, "GH200", "GH200 120GB"),
    _device("B200", "Blackwell", 180, 7700, (2250, 2250, 4500, 4500, 9000), (_S, 1800), 1000, "B200 (HGX)"),
    _device(
        "GB200", "Blackwell", 186, 8000, (2500, 2500, 5000, 5000, 10000), (_S, 1800), 1200, "GB200 (per GPU, NVL72)"
    ),
    _device("MI300X", "CDNA3", 192, 5300, (1307, 1307, 2615, 2615), (_S, 896), 750),
    _device("Xeon Platinum 8480+", "Sapphire Rapids", 0, 307, (0, 229, 458), (_P, 128), 350),
    _device("EPYC 9654", "Zen 4", 0, 461, (0, 29, 59), (_P, 128), 360),
    _device("Grace", "Neoverse V2", 480, 500, (0, 28, 57), (_P, 900), 250),
)


def find_device(name: str) -> Device:
    """Find a device by its name or nvidia-smi's, ignoring case and vendor. raises ConfigError"""
    by_name = {_spelt(alias): device for device in DEVICES for alias in (device.name, *device.aliases)}
    normalized = _spelt(name)
    if normalized not in by_name:
        raise ConfigError(f"no device is known as {name}", "a device of the catalogue",
                          nearest(normalized, by_name, [one.name for one in DEVICES if one.memory_bytes]))  # fmt: skip
    return by_name[normalized]


def _spelt(name: str) -> str:
    """Normalize a name: "NVIDIA H100 SXM", "h100-sxm" and "H100_SXM" are the same."""
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip().removeprefix("nvidia ")


# The least compute capability of each NVIDIA architecture.
CAPABILITIES: Mapping[tuple[int, int], str] = MappingProxyType({
    (7, 0): "Volta", (7, 5): "Turing", (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell",
})  # fmt: skip
MIN_CAPABILITY = (8, 0)  # the least for which Triton compiles our kernels


def multiplied(architecture: str) -> tuple[str, ...]:
    """Return the precisions that an architecture's devices multiply, in the order of their tables."""
    return tuple(dict.fromkeys(p for d in DEVICES if d.architecture == architecture for p in d.peaks))


def check_multiplies(gpu: str, capability: tuple[int, int], needed: Collection[str]) -> None:
    """Check a GPU's precisions. needed: of "fp16", "bf16", "int8", "fp8".

    raises ConfigError, naming GPUs that have them
    """
    check_architecture(*match_device_name(gpu, capability), needed)


def match_device_name(gpu: str, capability: tuple[int, int]) -> tuple[str, str]:
    """Return the catalog name of a local GPU, and its architecture."""
    own = max((least for least in CAPABILITIES if least <= capability), default=None)
    architecture = CAPABILITIES[own] if own else "before Volta"
    return f"{gpu} ({architecture}, sm_{capability[0]}{capability[1]})", architecture


def check_architecture(about: str, architecture: str, needed: Collection[str]) -> None:
    """Check any GPU of an architecture, as `check_multiplies`. about: its name in messages"""
    ours = {least: name for least, name in CAPABILITIES.items() if least >= MIN_CAPABILITY}
    if architecture not in ours.values():
        (a, b), first = min(ours.items())
        least = f"a GPU of NVIDIA's, {first} or later: sm_{a}{b} on"
        raise ConfigError(f"no kernel for GPUs here runs on {about}", least, "run on the CPU, or on another GPU")
    has = multiplied(architecture)
    lacks = [p for p in dict.fromkeys(needed) if p not in has]
    if lacks:
        able = [f"{name} (sm_{a}{b})" for (a, b), name in ours.items() if set(lacks) <= set(multiplied(name))]
        raise ConfigError(
            f"{about} does not multiply {', '.join(lacks)}; it has {', '.join(has)}",
            f"one of {', '.join(able)}" if able else "a GPU that does", _INSTEAD,
        )  # fmt: skip


_INSTEAD = "choose a precision that it has, such as w8a16, w4a16 or bf16, and another --kv-cache-dtype than fp8"
