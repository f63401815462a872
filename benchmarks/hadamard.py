"""What smaller errors of 8-bit activations cost in time: Hadamard's transform, and smaller groups of activations.

    python -m benchmarks.hadamard
    python -m benchmarks.hadamard --isas avx512 --pairs 60

Each sample rounds rows of float32 and multiplies them with a matrix: the shapes of one layer of the 1.1B model, with 1,
16 and 512 rows, weights of eight and of four bits in groups of 128. Bytes of weights are the same on both sides of a
pair. Programs are alive together and samples alternate; a pair's ratio is what counts, and the median of these. Weights
of the shapes are larger than second-level caches. Kernels go by their own rules here: what tuning chooses shows in a
whole engine. Writes results/hadamard-TIME-COMMIT.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.record import count, provenance, write_result
from millrace.engine.native.executor import NativeProgram, StatelessExecutor
from millrace.graph.types import Symbol
from millrace.kernels.declare import Param, RowFormat, Space, WeightFormat
from millrace.kernels.encode import Ref, encode
from millrace.kernels.layout import matrix_bytes, row_bytes
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores

ROWS = (1, 16, 512)
SHAPES = {"q, k, v": (2560, 2048), "o": (2048, 2048), "gate, up": (11264, 2048), "down": (2048, 5632)}  # N, K
WEIGHTS = {"w8": WeightFormat.W8, "w4": WeightFormat.W4}
GROUP = 128  # of the weights
SAMPLE_S = 0.005  # at least, so that starting a run does not count
_FILL = 0x3C  # of weights: codes, and scales that are numbers near 1


@dataclass(frozen=True, slots=True)
class Rows:
    """How activations are rounded."""

    format: RowFormat
    x_group: int

    @property
    def name(self) -> str:
        return f"groups of {self.x_group}" + (", by Hadamard" if self.format == RowFormat.HADAMARD_Q8 else "")


PLAIN = Rows(RowFormat.Q8, GROUP)
OTHERS = (
    Rows(RowFormat.HADAMARD_Q8, GROUP), Rows(RowFormat.Q8, 64), Rows(RowFormat.Q8, 32),
    Rows(RowFormat.HADAMARD_Q8, 64), Rows(RowFormat.HADAMARD_Q8, 32),
)  # fmt: skip


def layer(
    rows: int, weights: WeightFormat, how: Rows, isa: str, threads: int, shapes: Mapping[str, tuple[int, int]] = SHAPES
) -> StatelessExecutor:
    """A program of the products of one layer, each behind the conversion of its rows.

    raises MachineError for an instruction set that this CPU lacks
    """
    calls, w_at, w_bytes = [], 0, 0
    widest = max(k for _, k in shapes.values())
    x_bytes = 4 * rows * widest
    packed_bytes = rows * row_bytes(how.format, widest, how.x_group)
    for n, k in shapes.values():
        x_stride = row_bytes(how.format, k, how.x_group)
        x, packed = Ref(Space.ACTIVATIONS, 0), Ref(Space.ACTIVATIONS, x_bytes)
        rounding: dict[str, Param] = {
            "rows": 0, "n": k, "x_stride": k, "y_stride": x_stride, "format": int(how.format), "group": how.x_group,
        }  # fmt: skip
        calls.append(encode("convert", {"x": x, "y": packed}, rounding))
        product: dict[str, Param] = {
            "rows": 0, "n": n, "k": k, "group": GROUP, "x_group": how.x_group, "format": int(how.format),
            "weights": int(weights), "x_stride": x_stride, "y_stride": n,
        }  # fmt: skip
        y = Ref(Space.ACTIVATIONS, x_bytes + packed_bytes)
        calls.append(encode("matmul", {"x": packed, "w": Ref(Space.WEIGHTS, w_at), "y": y}, product))
        w_at += matrix_bytes(weights, n, k, GROUP)
    w_bytes = w_at
    y_bytes = 4 * rows * max(n for n, _ in shapes.values())
    program = NativeProgram(
        calls=b"".join(calls), n_calls=len(calls), weights=np.full(w_bytes, _FILL, np.uint8), weights_bytes=w_bytes,
        activation_bytes=x_bytes + packed_bytes + y_bytes, symbols={Symbol("rows"): rows},
    )  # fmt: skip
    network = StatelessExecutor(program, threads=threads, isa=isa)
    x_values = np.random.default_rng(0).standard_normal(rows * widest, np.float32)
    network.activations()[:x_bytes] = x_values.view(np.uint8)
    return network


def sample_s(network: StatelessExecutor, rows: int, repeats: int) -> float:
    """Seconds of one run of the layer."""
    started = time.perf_counter()
    for _ in range(repeats):
        network.compute([rows])
    return (time.perf_counter() - started) / repeats


def priced(
    rows: int, weights: str, isa: str, threads: int, pairs: int, shapes: Mapping[str, tuple[int, int]] = SHAPES
) -> dict[str, Any]:
    """Each way of rounding beside the plain one; ratios of pairs of neighbours in time, above 1 where it is slower."""
    ways = (PLAIN, *OTHERS)
    with ExitStack() as stack:
        networks = [
            stack.enter_context(closing(layer(rows, WEIGHTS[weights], how, isa, threads, shapes))) for how in ways
        ]
        warm = [sample_s(network, rows, 1) for _ in range(2) for network in networks]
        repeats = max(1, round(SAMPLE_S / min(warm)))
        samples: list[list[float]] = [[] for _ in ways]
        for at in range(pairs):
            order = range(len(ways)) if at % 2 else reversed(range(len(ways)))
            for i in order:
                samples[i].append(sample_s(networks[i], rows, repeats))
    plain = samples[0]
    ratios = [statistics.median(a / b for a, b in zip(taken, plain, strict=True)) for taken in samples]
    return {
        "isa": isa, "weights": weights, "rows": rows, "repeats": repeats,
        "ways": [
            {
                **asdict(how), "name": how.name, "median_s": statistics.median(taken), "samples_s": taken,
                "ratio": round(ratio, 4),
            }
            for how, taken, ratio in zip(ways, samples, ratios, strict=True)
        ],
    }  # fmt: skip


def run(isas: Sequence[str], threads: int, pairs: int) -> Iterator[dict[str, Any]]:
    for isa in isas:
        for weights in WEIGHTS:
            for rows in ROWS:
                yield priced(rows, weights, isa, threads, pairs)


def line(price: dict[str, Any]) -> str:
    plain, *others = price["ways"]
    told = ", ".join(f"{w['name']} {w['ratio'] - 1:+.1%}" for w in others)
    head = f"{price['weights']} on {price['isa']}, {price['rows']} rows"
    return f"{head}: {plain['median_s'] * 1e3:.3f} ms in {plain['name']}; {told}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hadamard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usable = usable_isas()
    default = [isa for isa in usable if isa in ("amx", "avx512")] or usable[:1]
    parser.add_argument("--isas", nargs="+", choices=usable, default=default, help="default: amx and avx512, or best")
    parser.add_argument("--threads", type=count, default=usable_cores())
    parser.add_argument("--pairs", type=count, default=40, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    if args.threads > usable_cores():
        parser.error(f"--threads {args.threads}: 1 to {usable_cores()}")
    prices = []
    result = provenance("benchmarks.hadamard")
    for price in run(args.isas, args.threads, args.pairs):
        prices.append(price)
        if not args.json:
            print(line(price), flush=True)
    result |= {"threads": args.threads, "group": GROUP, "shapes": SHAPES, "prices": prices}
    path = write_result("hadamard", result)
    print(json.dumps(result) if args.json else path)


if __name__ == "__main__":
    main()
