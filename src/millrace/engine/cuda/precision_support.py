"""Which precisions a GPU must multiply for an engine, and which it has. Needs no PyTorch, and no GPU at hand."""

from collections.abc import Iterator
from dataclasses import dataclass

from millrace.engine.cache_specs import KV_FORMATS, KvFormat
from millrace.engine.cuda.device_lookup import DatasheetDevice
from millrace.errors import ConfigError, EngineError
from millrace.kernels.declare import WeightFormat
from millrace.kernels.precision import Precision
from millrace.machine.devices import check_architecture

WIDE = ("fp32", "tf32")  # an engine's 32-bit floats: all GPUs with kernels here multiply them


def multiplied_by(precision: Precision, dtype: str, *, meets_fp8: bool = False) -> tuple[str, ...]:
    """Return the precisions to multiply, except float32, by the names of machine/devices.py.

    dtype: of an engine's floats; meets_fp8: the input rows are E4M3
    """
    if not precision.coded:
        return () if dtype in WIDE else (dtype,)
    rows = "int8" if precision.takes_bytes else "bf16" if dtype in WIDE else dtype
    return (rows, "fp8") if precision.weights == WeightFormat.FP8 or meets_fp8 else (rows,)


def check_keeps(kv: KvFormat | None) -> None:
    """Check that a KV format has kernels here. raises EngineError. None: like activations"""
    if kv not in (None, KvFormat.INT8, KvFormat.FP8):
        raise EngineError(f"keys and values in {KV_FORMATS[kv].name} on a GPU", "int8, fp8, or as the activations are",
                          "choose one of them")  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrecisionSupport:
    """requested: the flag and its value; needed: what it multiplies; why_not: "" if this GPU has all of it"""

    requested: str
    needed: tuple[str, ...]
    why_not: str

    @property
    def of_layers(self) -> bool:
        """Whether it applies to layers; otherwise to keys and values."""
        return self.requested.startswith("--precision")


def supported_precisions(gpu: DatasheetDevice) -> Iterator[PrecisionSupport]:
    """Yield the support of all layer precisions, and of all KV formats that are not floats."""
    for name in ("tf32", "fp16"):  # a CPU has neither of these, nor fp8
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
