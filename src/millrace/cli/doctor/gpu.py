"""`millrace doctor --device`: the precisions of a GPU, by the same table that builds and sizing use.

For a local GPU, or a MIG slice of one, also its measured rates compared with the datasheet.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from millrace.cli.console import heading, note, pairs, print_json, size, table
from millrace.engine.cuda.device_lookup import Gpu, known_gpu
from millrace.engine.cuda.precision_support import supported_precisions
from millrace.errors import ConfigError
from millrace.machine.devices import GB, TERA, Device, multiplied
from millrace.size.performance.hardware import named_hardware

if TYPE_CHECKING:  # PyTorch is imported where there is a GPU
    from millrace.engine.cuda.device_roofline import DeviceRates

_NO_MORE = {True: "fp32", False: "what layers do"}  # float32 all multiply, and codes of INT8 become floats


def examine_gpu(device: str, as_json: bool) -> None:
    """Print the precisions and rates of a GPU. raises ConfigError for an unknown name, MachineError if it is absent
    or fails"""
    gpu = known_gpu(device)
    has, support = multiplied(gpu.architecture), list(supported_precisions(gpu))
    rates = _measure_rates(gpu.here, has) if gpu.here else None
    if as_json:
        able = {
            one.requested.removeprefix("--"): {"multiplies": list(one.needed), "why_not": one.why_not or None}
            for one in support
        }
        document: dict[str, Any] = {"device": gpu.about, "architecture": gpu.architecture, "multiplies": list(has)}
        if gpu.here and rates:
            document |= {"free_bytes": gpu.here.free_bytes, "multiprocessors": gpu.here.multiprocessors}
            document["measured"] = asdict(rates)
        print_json({**document, "asked": able})
        return
    heading(gpu.about)
    pairs([("multiplies", ", ".join(has) or "nothing that is known here")])
    if gpu.here and rates:
        pairs([("free memory", size(gpu.here.free_bytes)), ("multiprocessors", str(gpu.here.multiprocessors))])
        table(("measured", "a second", "of its datasheet"), _rows(rates, _datasheet(gpu.here.name)))
    table(("asked for", "multiplies", "here"), [
        (one.requested, ", ".join(one.needed) or _NO_MORE[one.of_layers], "refused" if one.why_not else "yes")
        for one in support
    ])  # fmt: skip
    for reason in dict.fromkeys(one.why_not for one in support if one.why_not):
        note(f"refused: {reason}")


def _measure_rates(gpu: Gpu, precisions: tuple[str, ...]) -> "DeviceRates":
    from millrace.engine.cuda.device_roofline import measured  # and with it PyTorch

    return measured(gpu, precisions)


def _datasheet(name: str) -> Device | None:
    """Return the datasheet of a GPU by its driver's name, also of a slice: "NVIDIA H100 80GB HBM3 MIG 3g.40gb"."""
    try:
        return named_hardware(name.replace(" MIG ", " ")).device
    except ConfigError:  # not of the catalogue
        return None


def _rows(rates: "DeviceRates", sheet: Device | None) -> list[tuple[str, str, str]]:
    def share(rate: float, stated: float) -> str:
        return f"{rate / stated:.0%}" if stated else ""

    bandwidth, peaks = (sheet.bandwidth, sheet.peaks) if sheet else (0.0, {})
    memory = (("reading memory", rates.read), ("copying memory, read and written", rates.copied))
    return [
        *((what, f"{rate / GB:,.0f} GB", share(rate, bandwidth)) for what, rate in memory),
        *((f"products in {name}", f"{rate / TERA:,.1f} T operations", share(rate, peaks.get(name, 0.0)))
          for name, rate in rates.products.items()),
    ]  # fmt: skip
