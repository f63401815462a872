"""Precisions that a GPU has and our CPU kernels lack: float16, TF32, and E4M3 on both sides of a matmul.

TF32 is float32 whose factors are rounded to 10 mantissa bits; sums stay float32 (NVIDIA A100 whitepaper). In `fp8`
weights have a scale per output and activations one per token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from millrace.compile.precision import MEANT, PrecisionMap, StoredMatrix, plain_format
from millrace.compile.precision_selection import AUTO
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.engine.artifact.manifest import GpuSection
from millrace.errors import ConfigError, EngineError
from millrace.graph.rewrite import head_of
from millrace.graph.types import Graph
from millrace.kernels.precision import Precision

# By the name in --precision: the precision that layers have on a CPU instead.
IN_PLACE_OF: Mapping[str, Precision] = {
    "fp16": Precision.BF16, "tf32": Precision.FP32, "fp8": Precision.FP8A16,
}  # fmt: skip

_MEANT_HERE = dict.fromkeys(("float16", "f16", "half"), "use fp16") | {"fp8_e4m3": "use fp8"}


@dataclass(frozen=True, slots=True)
class GpuPrecision:
    """name: a key of IN_PLACE_OF, which replaces that precision everywhere; "": none. is_own: it is the checkpoint's"""

    name: str = ""
    is_own: bool = False

    def gpu_name(self, precision: str) -> str:
        """Return the name on a GPU for a CPU's precision."""
        return self.name if IN_PLACE_OF.get(self.name) == precision else precision

    @property
    def built(self) -> Precision | None:
        """The precision in which an engine is built, for a CPU; float32 represents all of float16."""
        return Precision.FP32 if self.name == "fp16" else IN_PLACE_OF.get(self.name)

    def lowered(self, precision: str) -> str:
        """Return a layer's precision in a GPU's passes. Both names may have groups after a colon"""
        return IN_PLACE_OF[self.name].value if self.name and precision == self.built else precision

    def floats(self, table: str) -> str:
        """Return the type of activations and unquantized weights. table: "f32" or "bf16", as in ResolvedOptions"""
        return self.gpu_name("fp32" if table == "f32" else "bf16")

    def check_kept(self, dtype: str | None) -> None:
        """Check a requested KV format. raises EngineError for bfloat16 in a float16 model, whose 16-bit type differs"""
        if self.name == "fp16" and dtype == "bf16":
            raise EngineError(
                "keys and values in bf16 of a model in fp16 on a GPU", "int8, fp8, or fp16, as the activations are",
                "leave --kv-cache-dtype out for fp16, choose int8 or fp8, or ask for --precision bf16",
            )  # fmt: skip

    def check_built(self, precisions: Mapping[str, str]) -> None:
        """Check an engine's precisions, given as in its manifest.

        raises ConfigError for bfloat16 layers among floats of another type: a GPU has one float type, and these weights
        are rounded
        """
        dtype = self.floats(plain_format(Precision(self.lowered(precisions["default"].partition(":")[0]))))
        if dtype != "bf16" and (narrow := [name for name, precision in precisions.items() if precision == "bf16"]):
            raise ConfigError(
                f"{narrow[0]} is built in bf16, and a GPU would have it in {dtype}, as all that is not coded",
                "floats of one type in an engine for a GPU", f"build it again without bf16 for {narrow[0]}",
            )  # fmt: skip

    def fp8_rows(self, stored: Mapping[str, StoredMatrix], traced: Graph, chosen: PrecisionMap) -> Iterator[str]:
        """Yield the linear layers with E4M3 input rows: those of the checkpoint, or all if fp8 is requested."""
        if self.name == "fp8":
            head = head_of(traced)
            layers = [n for n in traced.nodes if n.op == "linear"]
            yield from (
                n.origin[0] for n in layers if chosen.precision_of(n.origin[0], is_head=n is head) == Precision.FP8A16
            )
        for name, matrix in stored.items():
            precision = chosen.precision_of(name)
            if matrix.fp8_rows and precision == Precision.FP8A16 and chosen.stored_format(matrix.codes, precision):
                yield name

    def section(self, source: Source, traced: Graph, chosen: PrecisionMap) -> GpuSection:
        """Return the GPU section of an engine's manifest."""
        return GpuSection(self.name, sorted(set(self.fp8_rows(source.stored, traced, chosen))))  # type: ignore[arg-type]

    def described(self, precisions: Mapping[str, str]) -> dict[str, str]:
        """Return precisions as in manifests."""
        return {pattern: self.gpu_name(precision) for pattern, precision in precisions.items()}


def gpu_precision(
    build: BuildSettings, source: Source, precisions: Mapping[str, str] | None
) -> tuple[GpuPrecision, BuildSettings]:
    """Return the GPU precision, and the settings for a CPU. A float16 checkpoint keeps float16 by default.

    precisions: a map of layers. raises ConfigError for an unknown precision, or one that is not for single layers
    """
    _check_names(build.precision, precisions or {})
    own = "fp16" if _in_float16(source) else ""
    name = "" if precisions is not None else own if build.precision is None else build.precision
    if name not in IN_PLACE_OF:
        return GpuPrecision(), build
    return GpuPrecision(name, is_own=name == own), replace(build, precision=IN_PLACE_OF[name].value)


def _check_names(precision: str | None, precisions: Mapping[str, str]) -> None:
    """Check the names. raises ConfigError"""
    valid_names = f"one of {', '.join((*Precision, *IN_PLACE_OF))}"
    for pattern, of_layers in precisions.items():
        if of_layers in IN_PLACE_OF:
            raise ConfigError(
                f'"{pattern}" is to be {of_layers}, which is of a whole model', f"of layers {', '.join(Precision)}",
                f"ask for {of_layers} without a map, or for {IN_PLACE_OF[of_layers]} here",
            )  # fmt: skip
    if precision is not None and precision not in (*Precision, *IN_PLACE_OF, AUTO):
        fix = (MEANT | _MEANT_HERE).get(precision.lower(), "choose one of them")
        raise ConfigError(f'precision "{precision}" is unknown', f"on a GPU {valid_names}", fix)


def _in_float16(source: Source) -> bool:
    if source.stored:
        return all(matrix.dtype == "float16" and matrix.codes is None for matrix in source.stored.values())
    return source.dtype == "float16"
