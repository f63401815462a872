"""Every tile that a GPU may choose for its products, compiled for three architectures."""

import json
import os
import subprocess
import sys

import pytest

from millrace.kernels.matmul.gpu_tiles import EIGHT, EIGHT_OF_WORDS, ONE_OF_E4M3, tiles

pytestmark = pytest.mark.nightly
pytest.importorskip("triton")


@pytest.mark.parametrize(("arch", "spilled"), [(80, 0), (89, 16), (90, 0)])
def test_no_tile_spills_much(arch: int, spilled: int) -> None:
    """And none takes more than a program may have. Weights come in ahead of products: more blocks, more memory."""
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--arch", str(arch), "--json"]
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    rows = json.loads(out.stdout)
    (floats,) = (row for row in rows if row["about"] == "prompts of float32")
    assert floats["spilled_bytes"] == 0 and floats["shared_bytes"] <= 99 * 1024, floats
    found = [row for row in rows if row["about"].endswith("stages")]
    assert {row["about"] for row in found} == {
        f"{precision} {tile.rows} x {tile.columns}, {tile.warps} warps, {tile.stages} stages"
        for precision, most, few in (("fp8", 64, ONE_OF_E4M3), ("w8a8", 64, ()), ("w4a16", 32, EIGHT_OF_WORDS))
        for rows in (EIGHT, 16, 32, 64) for tile in (tiles(rows) if rows > EIGHT else few)[1:]
        if rows <= most and (arch >= 89 or precision != "fp8")
    }, "but for the rules, which are compiled by day, all that products may go by"  # fmt: skip
    shared = {row["about"]: row["shared_bytes"] for row in found}
    for precision in ("w4a16", "w8a8"):
        assert shared[f"{precision} 16 x 32, 4 warps, 9 stages"] >= 48_000, shared
    for row in found:
        assert row["registers"] <= 255 and row["shared_bytes"] <= 99 * 1024, row
        assert row["spilled_bytes"] <= spilled, row
