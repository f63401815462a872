"""Precisions that a GPU has and our CPU kernels do not: float16, TF32, and E4M3 on both sides of a product.

TF32 is float32 whose factors are rounded to 10 bits behind the leading one; sums stay float32 (NVIDIA A100 whitepaper).
In `fp8` weights have a scale for each output and activations one for each token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from millrace.compile.accuracy_pricing import AUTO
from millrace.compile.precision import MEANT, PrecisionMap, StoredMatrix, plain_format
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.engine.artifact.manifest import GpuSection
from millrace.errors import ConfigError, EngineError
from millrace.graph.rewrite import head_of
from millrace.graph.types import Graph
from millrace.kernels.precision import Precision

# By the name in --precision: the precision of layers that a CPU has in its place.
IN_PLACE_OF: Mapping[str, Precision] = {
    "fp16": Precision.BF16, "tf32": Precision.FP32, "fp8": Precision.FP8A16,
}  # fmt: skip

_MEANT_HERE = dict.fromkeys(("float16", "f16", "half"), "use fp16") | {"fp8_e4m3": "use fp8"}


@dataclass(frozen=True, slots=True)
class GpuPrecision:
    """name: of IN_PLACE_OF, for all that would be of the precision there; "": all as it is. is_own: the checkpoint's"""

    name: str = ""
    is_own: bool = False

    def named(self, precision: str) -> str:
        """What stands in its place."""
        return self.name if IN_PLACE_OF.get(self.name) == precision else precision

    @property
    def built(self) -> Precision | None:
        """As which an engine is built, that a CPU runs too; float32 holds all of float16."""
        return Precision.FP32 if self.name == "fp16" else IN_PLACE_OF.get(self.name)

    def lowered(self, precision: str) -> str:
        """Of a layer that is built so: as which a GPU's passes know it. Both may have groups behind a colon"""
        return IN_PLACE_OF[self.name].value if self.name and precision == self.built else precision

    def floats(self, table: str) -> str:
        """An engine's activations, and weights that are not coded. table: "f32" or "bf16", as Settled has it"""
        return self.named("fp32" if table == "f32" else "bf16")

    def check_kept(self, dtype: str | None) -> None:
        """asked: of keys and values. raises EngineError for bfloat16 of a model in float16, whose 16 bits are others"""
        if self.name == "fp16" and dtype == "bf16":
            raise EngineError(
                "keys and values in bf16 of a model in fp16 on a GPU", "int8, fp8, or fp16, as the activations are",
                "leave --kv-cache-dtype out for fp16, choose int8 or fp8, or ask for --precision bf16",
            )  # fmt: skip

    def check_built(self, precisions: Mapping[str, str]) -> None:
        """precisions: of an engine, as its manifest has them

        raises ConfigError for layers in bfloat16 among floats of another type: a GPU has one type for all, and these
        weights are rounded
        """
        dtype = self.floats(plain_format(Precision(self.lowered(precisions["default"].partition(":")[0]))))
        if dtype != "bf16" and (narrow := [name for name, precision in precisions.items() if precision == "bf16"]):
            raise ConfigError(
                f"{narrow[0]} is built in bf16, and a GPU would have it in {dtype}, as all that is not coded",
                "floats of one type in an engine for a GPU", f"build it again without bf16 for {narrow[0]}",
            )  # fmt: skip

    def fp8_rows(self, stored: Mapping[str, StoredMatrix], traced: Graph, chosen: PrecisionMap) -> Iterator[str]:
        """Linear layers that are meant to be multiplied with E4M3: by the checkpoint, or all by who asks for fp8."""
        if self.name == "fp8":
            head = head_of(traced)
            layers = [n for n in traced.nodes if n.op == "linear"]
            yield from (n.origin[0] for n in layers if chosen.of(n.origin[0], is_head=n is head) == Precision.FP8A16)
        for name, matrix in stored.items():
            precision = chosen.of(name)
            if matrix.fp8_rows and precision == Precision.FP8A16 and chosen.stored_format(matrix.codes, precision):
                yield name

    def section(self, source: Source, traced: Graph, chosen: PrecisionMap) -> GpuSection:
        """For an engine's manifest."""
        return GpuSection(self.name, sorted(set(self.fp8_rows(source.stored, traced, chosen))))  # type: ignore[arg-type]

    def described(self, precisions: Mapping[str, str]) -> dict[str, str]:
        """As manifests say it."""
        return {pattern: self.named(precision) for pattern, precision in precisions.items()}


def gpu_precision(
    build: BuildSettings, source: Source, precisions: Mapping[str, str] | None
) -> tuple[GpuPrecision, BuildSettings]:
    """And the settings as a CPU knows them. A checkpoint in float16 keeps that unless a precision is asked for.

    precisions: a map of layers. raises ConfigError for what is no precision, or none of a layer alone
    """
    _check_names(build.precision, precisions or {})
    own = "fp16" if _in_float16(source) else ""
    name = "" if precisions is not None else own if build.precision is None else build.precision
    if name not in IN_PLACE_OF:
        return GpuPrecision(), build
    return GpuPrecision(name, is_own=name == own), replace(build, precision=IN_PLACE_OF[name].value)


def _check_names(precision: str | None, precisions: Mapping[str, str]) -> None:
    """raises ConfigError"""
    valid_names = f"one of {', '.join((*Precision, *IN_PLACE_OF))}"
    for pattern, of_layers in precisions.items():
        if of_layers in IN_PLACE_OF:
            raise ConfigError(
                f'"{pattern}" is to be {of_layers}, which is of a whole model', f"of layers {', '.join(Precision)}",
                f"ask for {of_layers} without a map, or for {IN_PLACE_OF[of_layers]} here",
            )  # fmt: skip
    if precision is not None and precision not in (*Precision, *IN_PLACE_OF, AUTO):
        mend = (MEANT | _MEANT_HERE).get(precision.lower(), "choose one of them")
        raise ConfigError(f'precision "{precision}" is unknown', f"on a GPU {valid_names}", mend)


def _in_float16(source: Source) -> bool:
    if source.stored:
        return all(matrix.dtype == "float16" and matrix.codes is None for matrix in source.stored.values())
    return source.dtype == "float16"
