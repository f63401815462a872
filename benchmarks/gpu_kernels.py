"""What our kernels for GPUs take of one, by their compiler alone: no GPU is needed.

    python -m benchmarks.gpu_kernels

Compiles each for the shapes of Llama-3.1-8B in bfloat16, attention of whole texts for encoders', for the architectures
of an A100, an L4 and an H200: registers of a thread, shared memory of a program, and bytes that registers spill.
Writes results/gpu-kernels-TIME-COMMIT.json.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.record import provenance, write_result
from millrace.engine.cuda.attention_partition import FEW_ROWS, FLOAT_ROWS, MAX_PARTS, SOME_ROWS
from millrace.engine.cuda.attention_partition import MANY_ROWS as PROMPT_ROWS
from millrace.kernels.attention import texts_cuda
from millrace.kernels.attention.cuda import KEEP_WARPS, attend, compiled_for, merge, rotate_and_keep
from millrace.kernels.attention.texts_cuda import attend_texts
from millrace.kernels.convert import cuda as convert
from millrace.kernels.elementwise.cuda import gated
from millrace.kernels.gpu_launch import FROM
from millrace.kernels.matmul.coded import AS_E4M3, RowQuantization
from millrace.kernels.matmul.cuda import BLOCK_K, coded_product
from millrace.kernels.matmul.cuda_few import BYTES_DEPTH, WARP_BYTES, WARP_K, few_rows_of_words, one_row, registers
from millrace.kernels.matmul.gpu_tiles import EIGHT, EIGHT_OF_WORDS, MANY_ROWS, ONE_OF_E4M3, PREFETCH, Tile, tiles
from millrace.kernels.rms_norm.cuda import add_normalise, normalise
from millrace.kernels.sample import cuda as sample
from millrace.kernels.short_conv.cuda import BLOCK, convolve, keep_rows

ARCHITECTURES = 80, 89, 90
FP8_FROM = 89  # an A100 has no E4M3
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_HEADS: dict[str, Any] = {"H": 32, "K": 8, "D": 128, "DV": 128, "PAGE": 64, "WINDOW": 0, "SOFTCAP": 0.0}
_TILE = {"DEEP": 128, "WIDTH": 128}
_WIDE = {"D": 256, "DV": 256, "DEEP": 256, "WIDTH": 256}
_TYPES = {
    "positions": "*i32", "slots": "*i32", "tables": "*i32", "work": "*i32", "merges": "*i32",
    "blocks": "*i32", "starts": "*i32", "owner": "*i32", "before": "*i32", "behind": "*i32",
    "found_in": "*fp32", "sums_in": "*fp32", "w": "*fp32", "table": "*fp32", "scale": "fp32", "eps": "fp32",
    "q_row": "i32", "k_row": "i32", "v_row": "i32", "x_scales": "*fp32", "w_scales": "*fp16", "minimums": "*fp16",
    "x_row": "i32", "M": "i32", "N": "i32", "K": "i32", "w_row": "i32", "groups": "i32", "key_scales": "*fp32",
    "value_scales": "*fp32", "residual": "*fp32", "total": "*fp32", "scales": "*fp32", "p": "*fp64", "top_k": "*i64",
    "top_p": "*fp64", "min_p": "*fp64", "u": "*fp64", "tokens": "*i64", "V": "i32",
    "row_elements": "i32", "block_rows": "i32", "wrong": "i32", "at": "*i32", "drawn": "*i32", "rows": "*i32",
}  # fmt: skip
_CODED: dict[str, dict[str, str]] = {  # products by what meets in them
    "fp8": {"x": "*fp8e4nv", "w": "*fp8e4nv", "w_scales": "*fp32"}, "fp8a16": {"w": "*fp8e4nv", "w_scales": "*fp32"},
    "w8a16": {"w": "*i8"}, "w4a16": {"w": "*u8"}, "w8a8": {"x": "*i8", "w": "*i8"}, "w4a8": {"x": "*i8", "w": "*u8"},
}  # fmt: skip

TUNED = "fp8", "w4a16", "w8a8"  # of which every tile is compiled: others lie between

_PAGES = {"int8": "*i8", "fp8": "*fp8e4nv"}


def _product(precision: str, tile: Tile, minimums: bool = False) -> dict[str, Any]:
    halves = _CODED[precision]["w"] == "*u8"
    whole = _CODED[precision]["w"] == "*fp8e4nv"
    coded_x = "x" in _CODED[precision]
    return {"CODED_X": coded_x, "HALVES": halves, "ZERO": 8 if halves else 0, "MINIMUMS": minimums, "WHOLE": whole,
            "WORDS": halves and not coded_x, "EVEN": True, "GROUP": 0 if whole else 128,
            "X_GROUP": 0 if whole or not coded_x else 128, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
            "BLOCK_K": BLOCK_K if tile.rows > 1 else WARP_K * tile.warps, "DEPTH": BLOCK_K if halves else BYTES_DEPTH,
            "UNITS": 2 * WARP_BYTES // BLOCK_K, "WARPS": tile.warps, "AHEAD": tile.stages > 1, "PLAIN": False,
            "PREFETCH": PREFETCH, "TILE": tile}  # fmt: skip


def _by(tile: Tile) -> Any:
    return coded_product if tile.rows > EIGHT else few_rows_of_words if tile.rows > 1 else one_row


def _some(precision: str, rows: int) -> tuple[Tile, ...]:
    """Tiles of so many rows, the rule first, that products of no fewer go by."""
    if rows > EIGHT:
        return tiles(rows)
    return {("fp8", 1): ONE_OF_E4M3, ("w4a16", EIGHT): EIGHT_OF_WORDS}.get((precision, rows), ())  # W8A16's lie between


# What rows become, by the end of a case's name.
_ROWS: dict[str, RowQuantization | None] = {
    "": None, " to fp8": AS_E4M3, " to int8": RowQuantization(e4m3=False, group=128),
    " to int8, transformed": RowQuantization(e4m3=False, group=128, transform=True),
}  # fmt: skip


def _row(n: int, to: str, whole: bool = False) -> dict[str, Any]:
    shape = convert.shape_of(n, _ROWS[to], complete=whole)
    return {**shape.sizes, "CODED": _ROWS[to] is not None, "TO": to, "WARPS": shape.warps}


CASES: tuple[tuple[Any, str, dict[str, Any]], ...] = (
    *(
        (attend, f"{which}{kept}", {**_HEADS, **_TILE, "BLOCK_M": rows})
        for kept in ("", *(f", pages of {name}" for name in _PAGES))
        for which, rows in (("decode", FEW_ROWS), ("prompts before Hopper", SOME_ROWS), ("prompts", PROMPT_ROWS))
    ),
    *(
        (attend, f"{which}, a window", {**_HEADS, **_TILE, "BLOCK_M": rows, "WINDOW": 4096})
        for which, rows in (("decode", FEW_ROWS), ("prompts before Hopper", SOME_ROWS), ("prompts", PROMPT_ROWS))
    ),
    *(
        (attend, f"{which}, a window and a cap", {**_HEADS, **_WIDE, "BLOCK_M": rows, "WINDOW": 4096, "SOFTCAP": 50.0})
        for which, rows in (("decode, heads of 256", FEW_ROWS), ("prompts, heads of 256", SOME_ROWS))
    ),
    (attend, "decode, heads of 256", {**_HEADS, **_WIDE, "BLOCK_M": FEW_ROWS}),
    (attend, "prompts, heads of 256", {**_HEADS, **_WIDE, "BLOCK_M": SOME_ROWS}),
    *(
        (
            attend_texts,
            f"{rows} rows, {heads} heads of {size}",
            {
                "H": heads,
                "K": heads,
                "D": size,
                "DV": size,
                "DEEP": size,
                "WIDTH": size,
                "BLOCK_M": rows,
                "BLOCK_N": texts_cuda.BLOCK_N,
            },
        )
        for heads, size in ((12, 64), (12, 32))
        for rows in (FEW_ROWS, SOME_ROWS)
    ),
    (merge, "", {**_HEADS, "PARTS": MAX_PARTS, "WIDTH": 128}),
    (rotate_and_keep, "", {**_HEADS, "ROTATES": True, "HALF": 64, "WIDTH": 128, "STAGES": 0}),
    *(
        (rotate_and_keep, f"pages of {kept}", {**_HEADS, "ROTATES": True, "HALF": 64, "WIDTH": 128, "STAGES": stages})
        for kept, stages in (("int8", 0), ("fp8", 7))
    ),
    *(
        (kernel, "4 taps", {"N": 2048, "TAPS": 4, "HAS_BIAS": False, "BLOCK": BLOCK})
        for kernel in (convolve, keep_rows)
    ),
    (normalise, "4,096 columns", {"N": 4096, "WIDTH": 4096}),
    *((add_normalise, f"4,096 columns{to}", _row(4096, to, whole=True)) for to in _ROWS),
    *((gated, f"{n:,} columns{to}", _row(n, to)) for n in (14336, 28672) for to in _ROWS),
    *((convert.code_rows, f"{n:,} columns{to}", _row(n, to)) for n in (4096, 28672) for to in _ROWS if to),
    (one_row, "fp8", _product("fp8", ONE_OF_E4M3[0])),
    (few_rows_of_words, "w4a16", _product("w4a16", EIGHT_OF_WORDS[0])),
    (few_rows_of_words, "w8a16", _product("w8a16", EIGHT_OF_WORDS[0])),
    (few_rows_of_words, "w4a16 minimums", _product("w4a16", EIGHT_OF_WORDS[0], minimums=True)),
    *((coded_product, precision, _product(precision, tiles(16)[0])) for precision in _CODED),
    (sample.best_rows, "any vocabulary", {"BLOCK": sample.BEST_BLOCK}),
    (sample.put_tokens, "any number", {"BLOCK": 128}),
    (sample.draw_rows, "any vocabulary", {"BLOCK": sample.BLOCK}),
    (coded_product, "w4a16 minimums", _product("w4a16", tiles(16)[0], minimums=True)),
    *(
        (coded_product, f"{precision} many", _product(precision, tiles(MANY_ROWS)[0]))
        for precision in ("fp8", "w8a8", "w4a8")
    ),
)

# The tiles that a device may choose beside the rule, and what takes 10 s to compile.
TILES: tuple[tuple[Any, str, dict[str, Any]], ...] = (*(
    (_by(tile), f"{precision} {tile.rows} x {tile.columns}, {tile.warps} warps, {tile.stages} stages",
     _product(precision, tile))
    for precision in TUNED for rows in (1, EIGHT, 16, 32, MANY_ROWS) for tile in _some(precision, rows)[1:]
    if rows < MANY_ROWS or "x" in _CODED[precision]
), (attend, "prompts of float32", {**_HEADS, **_TILE, "BLOCK_M": FLOAT_ROWS}),
)  # fmt: skip


def compiled(kernel: Any, about: str, constants: dict[str, Any], arch: int) -> dict[str, Any]:
    """What one of them takes. Tensors that are not of another type by name are of bfloat16, or as `about` says."""
    names = kernel.arg_names
    is_product = kernel in (coded_product, one_row, few_rows_of_words)
    types = _TYPES | _CODED[about.split()[0]] if is_product else dict(_TYPES)
    if "pages of" in about:
        types["keys"] = types["values"] = _PAGES[about.rsplit(maxsplit=1)[1]]
    if kernel in (sample.best_rows, sample.put_tokens):
        types["tokens"] = "*i32"
    if constants.get("CODED"):
        types["y"] = "*fp8e4nv" if constants["TO"] == " to fp8" else "*i8"
    overlaps = "PDL" in names and (arch // 10, arch % 10) >= FROM
    floats = "*fp32" if "float32" in about else "*bf16"
    known = {name: value for name, value in {**constants, "PDL": overlaps}.items() if name in names}
    signature = {n: "constexpr" if n in known else types.get(n, floats) for n in names}
    # What a launch knows: memory begins at multiples of 16, and so do this shape's rows and groups.
    unknown = {p.num for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    kinds = [signature[name] for name in names]
    multiples = [i for i, kind in enumerate(kinds) if i not in unknown and (kind == "i32" or "*" in kind)]
    attrs = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=attrs)
    options: dict[str, Any] = {"enable_fp_fusion": True, "launch_pdl": overlaps}
    if kernel is attend:
        element = 1 if "pages of" in about else 4 if "float32" in about else 2
        options |= compiled_for(constants["BLOCK_M"], constants["D"], element, arch >= 90)
    if kernel is attend_texts:
        options["num_warps"] = texts_cuda.warps(constants["BLOCK_M"])
    if kernel is rotate_and_keep:
        options["num_warps"] = KEEP_WARPS
    if "WARPS" in constants:
        options["num_warps"] = constants["WARPS"]
    if kernel is sample.best_rows:
        options["num_warps"] = sample.BEST_WARPS
    if kernel is sample.draw_rows:
        options |= {"num_warps": sample.WARPS, "enable_fp_fusion": False}
    if is_product:
        tile = constants["TILE"]
        options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    if kernel is few_rows_of_words:
        options |= {"num_stages": 1, "maxnreg": registers(tile, constants["HALVES"], constants["DEPTH"])}
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    told = _dumped(found.asm["cubin"], "-res-usage")
    usage = dict(part.split(":", 1) for part in told.split("Function", 1)[1].split() if part.count(":") == 1)
    return {
        "kernel": found.metadata.name, "about": about, "architecture": f"sm_{arch}", "registers": int(usage["REG"]),
        "shared_bytes": found.metadata.shared, "spilled_bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
        "warps": found.metadata.num_warps, "overlaps": _overlaps(found.asm["ptx"]),
        "asks_ahead": "prefetch.L2" in found.asm["ptx"],
        "under_way_bytes": _under_way(found) if is_product else 0,
    } | ({"loop": _loop(found.asm["cubin"])} if is_product else {})  # fmt: skip


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([OBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout


def _under_way(kernel: Any) -> int:
    """Bytes that a program has asked for when it waits for some of them, in its loop: by PTX where they go to shared
    memory, group by group; else by the loads of 16 bytes for each thread in a row, which come before they are used and
    before a barrier: there are no weights behind one."""
    threads = 32 * int(kernel.metadata.num_warps)
    before, waits, _ = kernel.asm["ptx"].partition("cp.async.wait_group")
    if waits:
        groups = [
            16 * threads * part.count("cp.async.cg.shared") for part in before.split("cp.async.commit_group")[:-1]
        ]
        left = int(kernel.asm["ptx"][len(before) + len(waits) :].split(";", 1)[0])
        return sum(groups[len(groups) - left :])
    sass = _dumped(kernel.asm["cubin"], "-sass").partition("ACQBULK")[2]
    used = re.split(r"\bF2FP\b|\bFFMA\b", sass.partition("BAR")[0])
    return 16 * threads * max(part.count("LDG.E.128") for part in used)


def _loop(cubin: bytes) -> int:
    """Instructions of the longest loop: all that are from the place to which one jumps back, to that one."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", _dumped(cubin, "-sass"), re.MULTILINE)
    at = {int(place, 16): i for i, (place, _) in enumerate(found)}
    jumps = ((re.search(r"\bBRA\S*(?: [!U]*P\d,)? `?\(?0x([0-9a-f]+)", does), i) for i, (_, does) in enumerate(found))
    return max((i - at[int(jump[1], 16)] + 1 for jump, i in jumps if jump and at[int(jump[1], 16)] < i), default=0)


def _overlaps(ptx: str) -> bool:
    """Whether it may begin before those before it have ended. raises AssertionError where it then touches memory early,
    or lets none begin behind it"""
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    early = re.findall(r"\b(?:ld|st|atom|red)\.(?!param|shared|local)|\bcp\.async\.(?!bulk\.prefetch)", before)
    assert not waits or (not early and "griddepcontrol.launch_dependents" in ptx), early
    return bool(waits)


def every(architectures: tuple[int, ...], with_tiles: bool = True, most: int | None = None) -> Iterator[dict[str, Any]]:
    """most: cases of a kernel"""
    for arch in architectures:
        seen = Counter[str]()
        for kernel, about, constants in (*CASES, *(TILES if with_tiles else ())):
            seen[kernel.__name__] += 1
            if most is not None and seen[kernel.__name__] > most:
                continue
            if ("fp8" in about and arch < FP8_FROM) or ("before Hopper" in about and arch >= 90):
                continue
            if kernel is attend and constants["BLOCK_M"] == PROMPT_ROWS and arch < 90:
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
    parser.add_argument("--most", type=int, metavar="N", help="cases of each kernel, and no result file")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    rows = list(every((args.arch,) if args.arch else ARCHITECTURES, not args.no_tiles, args.most))
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print("{architecture} {kernel:16} {about:36} {registers:4} registers".format(**row),
                  "{shared_bytes:7,} bytes shared {spilled_bytes:5} spilled".format(**row),
                  "overlaps" * row["overlaps"])  # fmt: skip
    if not args.arch and not args.no_tiles and args.most is None:
        print(write_result("gpu-kernels", {**provenance("benchmarks.gpu_kernels"), "kernels": rows}))


if __name__ == "__main__":
    main()
