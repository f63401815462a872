"""Whatever two layers of Llama-3.1-8B's shape launch on an H200, bound and compiled by Triton with what it is given."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = pytest.mark.nightly
pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w4a16", "w8a8"])
def test_all_that_is_launched_compiles(precision: str) -> None:
    """Steps of buckets, mixed ones, and each tile that a start may time; and no more kernels than there are constants:
    each takes a GPU's first start some tenths of a second."""
    command = [sys.executable, "-m", "tests.support.compilations", "all", precision]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = Counter(json.loads(done.stdout))
    assert {"attend", "rotate_and_keep", "add_normalise", "gated"} <= found.keys()
    assert ("coded_product" in found) == (precision != "bf16")
    assert found.total() <= 60, found
