"""Matrix products alone, by the number of rows: how near the kernels are to the instructions' peak and to the memory.

    python -m benchmarks.products --precision w4a8 --k 2048 --n 512 --threads 1
    python -m benchmarks.products --n 131072      weights that no cache holds

Small weights (the default) stay in the second-level cache, so arithmetic alone counts; large ones come from memory each
time. Kernels go by their own rules here: what tuning chooses shows in a whole engine. Writes
results/products-PRECISION-ISA-SIZE-TIME-COMMIT.json.
"""

import argparse
import json
import statistics
from typing import Any

from benchmarks.record import provenance, write_result
from millrace.engine.roofline_probe import PRECISIONS, peak_rates, product_bytes, product_seconds, read_rates
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores

ROWS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 32, 64, 128)
REPEATS = 32  # products a step, so that starting a step does not count
LARGE = 4 << 20  # bytes of weights from which a step is long enough by itself


def run(isa: str, precision: str, threads: int, n: int, k: int, rows: list[int]) -> dict[str, Any]:
    weights = product_bytes(precision, n, k)
    found = []
    for r in rows:
        samples = product_seconds(isa, precision, threads, r, n, k, repeats=1 if weights > LARGE else REPEATS)
        seconds = statistics.median(samples)
        peak = statistics.median(peak_rates(isa, PRECISIONS[precision], threads))
        read = statistics.median(read_rates(isa, threads, 64 << 20))
        found.append({
            "rows": r, "median_s": seconds, "samples_s": samples, "operations_per_s": 2.0 * r * n * k / seconds,
            "weights_bytes_per_s": weights / seconds, "peak_per_s": peak, "read_bytes_per_s": read,
        })  # fmt: skip
    return {
        **provenance("benchmarks.products"), "isa": isa, "precision": precision, "threads": threads, "n": n, "k": k,
        "weights_bytes": weights, "products": found,
    }  # fmt: skip


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", choices=usable_isas(), default=usable_isas()[0])
    parser.add_argument("--precision", choices=[*PRECISIONS], default="w4a8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n", type=int, default=512, help="outputs (default: %(default)s)")
    parser.add_argument("--k", type=int, default=2048, help="inputs (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[*ROWS])
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    args = parser.parse_args()
    if not 1 <= args.threads <= usable_cores():
        parser.error(f"--threads {args.threads}: 1 to {usable_cores()}")
    result = run(args.isa, args.precision, args.threads, args.n, args.k, args.rows)
    path = write_result(f"products-{args.precision}-{args.isa}-{args.n}x{args.k}", result)
    print(json.dumps(result) if args.json else f"{table(result)}\n{path}")


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['precision']}, {result['n']} x {result['k']}, {result['threads']} threads, {result['isa']}"]
    for p in result["products"]:
        share = f", {p['operations_per_s'] / p['peak_per_s']:.0%} of the peak" if p["peak_per_s"] else ""
        lines.append(
            f"  {p['rows']:4} rows {p['median_s'] * 1e6:9.1f} us  weights {p['weights_bytes_per_s'] / 1e9:6.1f} GB/s "
            f"(memory {p['read_bytes_per_s'] / 1e9:.0f})  {p['operations_per_s'] / 1e9:6.0f} GOP/s{share}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
