"""What our kernels for GPUs take of one, by their compiler alone: no GPU is needed.

    python -m benchmarks.gpu_kernels

Compiles each for the shapes of Llama-3.1-8B in bfloat16, for the architectures of an A100, an L4 and an H200: registers
of a thread, shared memory of a program, and bytes that registers spill. Writes results/gpu-kernels-TIME-COMMIT.json.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.record import provenance, write_result
from millrace.kernels.attention.cuda import attend, merge, rotate_and_keep, warps
from millrace.kernels.elementwise import cuda as elementwise
from millrace.kernels.matmul.cuda import BLOCK_K, coded_product
from millrace.kernels.matmul.gpu_tiles import MANY_ROWS, Tile, tiles
from millrace.kernels.rms_norm.cuda import add_normalise, normalise
from millrace.kernels.sample import cuda as sample

ARCHITECTURES = 80, 89, 90
FP8_FROM = 89  # an A100 has no E4M3
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_HEADS = {"H": 32, "K": 8, "D": 128, "DV": 128, "PAGE": 64}
_TILE = {"DEEP": 128, "WIDTH": 128}
_TYPES = {
    "positions": "*i32", "slots": "*i32", "starts": "*i32", "tables": "*i32", "table_starts": "*i32", "blocks": "*i32",
    "partial": "*fp32", "w": "*fp32", "table": "*fp32", "scale": "fp32", "eps": "fp32", "q_row": "i32", "k_row": "i32",
    "v_row": "i32", "x_scales": "*fp32", "w_scales": "*fp16", "minimums": "*fp16", "M": "i32", "N": "i32", "K": "i32",
    "w_row": "i32", "x_group": "i32", "group": "i32", "key_scales": "*fp32", "value_scales": "*fp32",
    "residual": "*fp32", "total": "*fp32", "scales": "*fp32", "p": "*fp64", "top_k": "*i64", "top_p": "*fp64",
    "min_p": "*fp64", "u": "*fp64", "tokens": "*i64", "V": "i32",
}  # fmt: skip
_CODED: dict[str, dict[str, str]] = {  # products by what meets in them
    "fp8": {"x": "*fp8e4nv", "w": "*fp8e4nv", "w_scales": "*fp32"}, "fp8a16": {"w": "*fp8e4nv", "w_scales": "*fp32"},
    "w8a16": {"w": "*i8"}, "w4a16": {"w": "*u8"}, "w8a8": {"x": "*i8", "w": "*i8"}, "w4a8": {"x": "*i8", "w": "*u8"},
}  # fmt: skip

TUNED = "fp8", "w4a16", "w8a8"  # of which every tile is compiled: others lie between

_PAGES = {"int8": "*i8", "fp8": "*fp8e4nv"}


def _product(precision: str, tile: Tile, minimums: bool = False) -> dict[str, Any]:
    halves = _CODED[precision]["w"] == "*u8"
    return {"CODED_X": "x" in _CODED[precision], "HALVES": halves, "ZERO": 8 if halves else 0, "MINIMUMS": minimums,
            "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK_K, "TILE": tile}  # fmt: skip


CASES: tuple[tuple[Any, str, dict[str, Any]], ...] = (
    (attend, "decode, 4 splits", {**_HEADS, **_TILE, "SPLITS": 4, "BLOCK_M": 16}),
    (attend, "decode, no splits", {**_HEADS, **_TILE, "SPLITS": 1, "BLOCK_M": 16}),
    (attend, "prompts", {**_HEADS, **_TILE, "SPLITS": 1, "BLOCK_M": 64}),
    (merge, "4 splits", {"DV": 128, "SPLITS": 4, "WIDTH": 128}),
    (rotate_and_keep, "", {**_HEADS, "ROTATES": True, "HALF": 64, "WIDTH": 128, "STAGES": 0}),
    *(
        (attend, f"{rows}, pages of {kept}", {**_HEADS, **_TILE, "SPLITS": splits, "BLOCK_M": block})
        for kept in _PAGES
        for rows, splits, block in (("decode", 4, 16), ("prompts", 1, 64))
    ),
    *(
        (rotate_and_keep, f"pages of {kept}", {**_HEADS, "ROTATES": True, "HALF": 64, "WIDTH": 128, "STAGES": stages})
        for kept, stages in (("int8", 0), ("fp8", 7))
    ),
    (normalise, "4,096 columns", {"N": 4096, "WIDTH": 4096}),
    *((add_normalise, f"4,096 columns{to}", {"N": 4096, "WIDTH": 4096, "CODED": to != ""}) for to in ("", " to fp8")),
    *(
        (elementwise.gated, f"{n:,} columns{to}", {"N": n, "WIDTH": 1 << n.bit_length(), "CODED": to != ""})
        for n in (14336, 28672)
        for to in ("", " to fp8")
    ),
    *((coded_product, precision, _product(precision, tiles(1)[0])) for precision in _CODED),
    (sample.draw_rows, "any vocabulary", {"BLOCK": sample.BLOCK}),
    (coded_product, "w4a16 minimums", _product("w4a16", tiles(1)[0], minimums=True)),
    *(
        (coded_product, f"{precision} many", _product(precision, tiles(MANY_ROWS)[0]))
        for precision in ("fp8", "w8a8", "w4a8")
    ),
)

# The tiles that a device may choose beside the rule.
TILES: tuple[tuple[Any, str, dict[str, Any]], ...] = tuple(
    (coded_product, f"{precision} {tile.rows} x {tile.columns}, {tile.warps} warps, {tile.stages} stages",
     _product(precision, tile))
    for precision in TUNED for rows in (1, 32, MANY_ROWS) for tile in tiles(rows)[1:]
)  # fmt: skip


def compiled(kernel: Any, about: str, constants: dict[str, Any], arch: int) -> dict[str, Any]:
    """What one of them takes. Tensors that are not of another type by name are of bfloat16."""
    names = kernel.arg_names
    types = _TYPES | _CODED[about.split()[0]] if kernel is coded_product else dict(_TYPES)
    if "pages of" in about:
        types["keys"] = types["values"] = _PAGES[about.rsplit(maxsplit=1)[1]]
    if constants.get("CODED"):
        types["y"] = "*fp8e4nv"
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    known = {name: value for name, value in constants.items() if name in names}
    # What a launch knows: memory begins at multiples of 16, and so do this shape's rows and groups.
    unknown = {p.num for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    kinds = [signature[name] for name in names]
    multiples = [i for i, kind in enumerate(kinds) if i not in unknown and (kind == "i32" or "*" in kind)]
    attrs = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=attrs)
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if kernel is attend:
        options["num_warps"] = warps(constants["BLOCK_M"])
    if kernel is elementwise.gated:
        options["num_warps"] = elementwise.warps(constants["WIDTH"])
    if kernel is sample.draw_rows:
        options |= {"num_warps": sample.WARPS, "enable_fp_fusion": False}
    if kernel is coded_product:
        tile = constants["TILE"]
        options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        told = subprocess.run([OBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(part.split(":", 1) for part in told.split("Function", 1)[1].split() if part.count(":") == 1)
    return {
        "kernel": found.metadata.name, "about": about, "architecture": f"sm_{arch}", "registers": int(usage["REG"]),
        "shared_bytes": found.metadata.shared, "spilled_bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
        "warps": found.metadata.num_warps,
    }  # fmt: skip


def every(architectures: tuple[int, ...], with_tiles: bool = True) -> Iterator[dict[str, Any]]:
    for arch in architectures:
        for kernel, about, constants in (*CASES, *(TILES if with_tiles else ())):
            if "fp8" in about and arch < FP8_FROM:
                continue
            yield compiled(kernel, about, constants, arch)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kernels", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="only this one, and no result file")
    parser.add_argument("--no-tiles", action="store_true", help="products by their rule alone")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    rows = list(every((args.arch,) if args.arch else ARCHITECTURES, not args.no_tiles))
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print("{architecture} {kernel:16} {about:36} {registers:4} registers".format(**row),
                  "{shared_bytes:7,} bytes shared {spilled_bytes:5} spilled".format(**row))  # fmt: skip
    if not args.arch and not args.no_tiles:
        print(write_result("gpu-kernels", {**provenance("benchmarks.gpu_kernels"), "kernels": rows}))


if __name__ == "__main__":
    main()
