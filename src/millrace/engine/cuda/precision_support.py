"""What a GPU must multiply for a precision, and which precisions one has. No PyTorch: asked before there is a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

from millrace.engine.cache_specs import KV_FORMATS, KvFormat
from millrace.engine.cuda.device_lookup import DatasheetDevice
from millrace.errors import ConfigError, EngineError
from millrace.kernels.declare import WeightFormat
from millrace.kernels.precision import Precision
from millrace.machine.devices import check_architecture

WIDE = ("fp32", "tf32")  # engine's floats of 32 bits: all GPUs that have kernels here multiply them


def multiplied_by(precision: Precision, dtype: str, *, meets_fp8: bool = False) -> tuple[str, ...]:
    """As machine/devices.py calls it; float32 all multiply. dtype: of an engine's floats; meets_fp8: rows of E4M3"""
    if not precision.coded:
        return () if dtype in WIDE else (dtype,)
    rows = "int8" if precision.takes_bytes else "bf16" if dtype in WIDE else dtype
    return (rows, "fp8") if precision.weights == WeightFormat.FP8 or meets_fp8 else (rows,)


def check_keeps(kv: KvFormat | None) -> None:
    """raises EngineError for keys and values that no kernel here keeps so. None: as activations are"""
    if kv not in (None, KvFormat.INT8, KvFormat.FP8):
        raise EngineError(f"keys and values in {KV_FORMATS[kv].name} on a GPU", "int8, fp8, or as the activations are",
                          "choose one of them")  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrecisionSupport:
    """requested: the flag and its value; needed: what it multiplies; why_not: "" where this GPU has all of that"""

    requested: str
    needed: tuple[str, ...]
    why_not: str

    @property
    def of_layers(self) -> bool:
        """Else of keys and values."""
        return self.requested.startswith("--precision")


def abilities(gpu: DatasheetDevice) -> Iterator[PrecisionSupport]:
    """Of all precisions of layers, and of keys and values that are no floats."""
    for name in ("tf32", "fp16"):  # which a CPU has not, nor fp8
        yield _ability(gpu, f"--precision {name}", multiplied_by(Precision.FP32, name))
    yield _ability(gpu, "--precision fp8", multiplied_by(Precision.FP8A16, "bf16", meets_fp8=True))
    for precision in Precision:
        dtype = "fp32" if precision == Precision.FP32 else "bf16"
        needed = dict.fromkeys((*multiplied_by(Precision(dtype), dtype), *multiplied_by(precision, dtype)))
        yield _ability(gpu, f"--precision {precision}", tuple(needed))
    yield _ability(gpu, "--kv-cache-dtype int8", ())
    yield _ability(gpu, "--kv-cache-dtype fp8", ("fp8",))


def _ability(gpu: DatasheetDevice, precision: str, needed: tuple[str, ...]) -> PrecisionSupport:
    try:
        check_architecture(gpu.about, gpu.architecture, needed)
    except ConfigError as error:
        return PrecisionSupport(precision, needed, error.what)
    return PrecisionSupport(precision, needed, "")
