"""Floats that a GPU multiplies and our CPU kernels do not: float16, and TF32.

TF32 is float32 whose factors are rounded to 10 bits behind the leading one; sums stay float32 (NVIDIA A100 whitepaper).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.kernels.precision import Precision

# By the name in --precision: the precision of layers whose place they take.
IN_PLACE_OF: Mapping[str, Precision] = {"fp16": Precision.BF16, "tf32": Precision.FP32}


@dataclass(frozen=True, slots=True)
class Floats:
    """name: fp16 or tf32, for all that would be bf16 or fp32; "": these as they are. exact: a checkpoint's own"""

    name: str = ""
    exact: bool = False

    def dtype(self, usual: str) -> str:
        """Of an engine: its activations, and weights that are not coded."""
        return self.name if IN_PLACE_OF.get(self.name) == usual else usual

    def described(self, precisions: Mapping[str, str]) -> dict[str, str]:
        """As manifests say it."""
        return {pattern: self.dtype(precision) for pattern, precision in precisions.items()}


def floats_of(build: BuildSettings, source: Source, mapped: bool) -> tuple[Floats, BuildSettings]:
    """And the settings as a CPU knows them. A checkpoint in float16 keeps that unless a precision is asked for.

    mapped: by a map of layers
    """
    own = "fp16" if _in_float16(source) else ""
    name = "" if mapped else own if build.precision is None else build.precision
    if name not in IN_PLACE_OF:
        return Floats(), build
    return Floats(name, exact=name == own), replace(build, precision=IN_PLACE_OF[name].value)


def _in_float16(source: Source) -> bool:
    if source.stored:
        return all(matrix.dtype == "float16" and matrix.held is None for matrix in source.stored.values())
    return source.dtype == "float16"
