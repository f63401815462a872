"""Every tile that a GPU may choose for its products, compiled for three architectures."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly
pytest.importorskip("triton")


@pytest.mark.parametrize(("arch", "spilled"), [(80, 0), (89, 16), (90, 0)])
def test_no_tile_spills_much(arch: int, spilled: int) -> None:
    """And none takes more than a program may have. Weights come in ahead of products: more blocks, more memory."""
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--arch", str(arch), "--json"]
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    found = [row for row in json.loads(out.stdout) if row["about"].endswith("stages")]
    assert len(found) >= 28
    shared = {row["about"]: row["shared_bytes"] for row in found}
    for precision in ("w4a16", "w8a8"):
        assert shared[f"{precision} 16 x 32, 4 warps, 9 stages"] >= 48_000, shared
    for row in found:
        assert row["registers"] <= 255 and row["shared_bytes"] <= 99 * 1024, row
        assert row["spilled_bytes"] <= spilled, row
