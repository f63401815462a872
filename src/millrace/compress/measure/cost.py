"""Cost of a layer's format: its bytes in the folder, or the seconds of its matmul, timed on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.compile.settings import Progress
from millrace.compress.compression_plan import WEIGHT, CompressionPlan, kept_dtype
from millrace.compress.search.candidates import FLOAT, TREATMENTS, bytes_of, candidate_formats
from millrace.engine.roofline_probe import ProbedMatmul, seconds_of
from millrace.kernels.layout import up
from millrace.kernels.precision import Precision

_MAX_BYTES = 256 << 20  # of the matrices that are timed in rotation
_MAX_CALLS = 4096


def product_of(plan: CompressionPlan, layer: str, format: str, isa: str) -> ProbedMatmul:
    """Return the matmul that an engine of the folder runs for this layer, without fused operations."""
    N, K = plan.checkpoint.tensors[layer + WEIGHT].shape
    treatment, own = TREATMENTS[format], kept_dtype(plan.checkpoint, layer + WEIGHT)
    if format == FLOAT:
        precision = Precision.BF16 if own == "BF16" else Precision.FP32
    elif treatment.fp8:
        precision = Precision.FP8A16
    elif treatment.bits == 8:
        precision = Precision.W8A8 if treatment.activations == 8 else Precision.W8A16
    else:
        precision = Precision.W4A8 if treatment.activations == 8 else Precision.W4A16
    group = (treatment.group or up(K, 4)) if precision.quantised else 0
    rows = precision.storage(group).format
    return ProbedMatmul(N, K, rows, precision.weights, group, tiles=isa == "amx" and precision == Precision.BF16)


@dataclass(slots=True)
class Clock:
    """Times matmuls of a number of rows, each kind once.

    It rotates through matrices with the total size of a whole model's in that format, so that they come from memory or
    cache as in the model.
    """

    isa: str
    threads: int
    rows: int
    matrices: Callable[[ProbedMatmul], int]
    result: dict[ProbedMatmul, float] = field(default_factory=dict)

    def __call__(self, product: ProbedMatmul) -> float:
        if product not in self.result:
            n = max(1, min(self.matrices(product), _MAX_BYTES // product.nbytes, _MAX_CALLS))
            rounds = seconds_of(product, self.isa, self.threads, self.rows, repeats=n, matrices=n)
            self.result[product] = min(rounds)  # other load on the machine only adds time
        return self.result[product]


def seconds(
    plan: CompressionPlan,
    rows: int,
    isa: str,
    threads: int,
    progress: Progress,
    clock: Callable[[ProbedMatmul], float] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the seconds of each layer's matmul of `rows` rows in each format. clock: replaces this machine's

    A matmul is timed alone: sharing a call between layers of one input, and quantizing rows, are not included.
    """
    shapes = [plan.checkpoint.tensors[layer + WEIGHT].shape for layer in plan.layers]
    n_weights = sum(N * K for N, K in shapes)
    clock = clock or Clock(isa, threads, rows, lambda p: -(-n_weights // (p.n * p.k)))
    result: dict[str, dict[str, float]] = {}
    for number, (layer, (_, K)) in enumerate(zip(plan.layers, shapes, strict=True)):
        progress("timing products", number, len(plan.layers))
        result[layer] = {format: clock(product_of(plan, layer, format, isa)) for format in candidate_formats(K)}
    return result


def nbytes(plan: CompressionPlan) -> dict[str, dict[str, float]]:
    """Return each layer's bytes in the folder in each format."""
    shapes = {layer: plan.checkpoint.tensors[layer + WEIGHT].shape for layer in plan.layers}
    return {
        layer: {format: float(bytes_of(plan, layer, format)) for format in candidate_formats(K)}
        for layer, (_, K) in shapes.items()
    }
