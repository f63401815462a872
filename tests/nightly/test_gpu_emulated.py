"""Kernels as a GPU would run them, without one: what they compile to, in an emulator of its instructions."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from millrace.kernels.matmul.gpu_tiles import EIGHT_OF_WORDS
from tests.support.ptx import tensor_core

pytestmark = pytest.mark.nightly
pytest.importorskip("triton", reason="triton is not installed")

# bits, rows, columns, inputs, group, minimums, type, tile
CASES = [
    (4, 1, 32, 4096, 128, False, "bfloat16", 0), (4, 8, 40, 2048, 128, False, "bfloat16", 0),
    (4, 3, 33, 1024, 128, True, "float16", 1), (4, 1, 17, 4096, 128, False, "float16", 2),
    (4, 5, 70, 3072, 128, False, "bfloat16", 3), (4, 2, 19, 2184, 256, True, "bfloat16", 0),
    (4, 7, 37, 136, 32, False, "bfloat16", 0), (4, 1, 17, 2040, 64, True, "bfloat16", 1),
    (4, 4, 9, 1032, 0, False, "float16", 2), (4, 1, 1, 8, 128, False, "bfloat16", 3),
    (4, 2, 40, 2048, 32, False, "float16", 0), (4, 2, 40, 4096, 64, True, "bfloat16", 2),
    (8, 1, 40, 2048, 128, False, "bfloat16", 0), (8, 8, 33, 1020, 128, False, "float16", 1),
    (8, 3, 20, 2048, 64, True, "bfloat16", 2), (8, 2, 35, 1000, 0, False, "bfloat16", 3),
    (8, 5, 17, 1024, 32, False, "float16", 0),
]  # fmt: skip


def test_few_rows_by_int4_and_int8() -> None:
    """Threads' layouts and the instruction in it, which an interpreter never sees; beside float64, but for rounding."""
    assert {case[-1] for case in CASES} == set(range(len(EIGHT_OF_WORDS)))
    command = [sys.executable, "-m", "tests.support.emulated", json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(zip(CASES, json.loads(done.stdout), strict=True))
    assert max(found.values()) <= 5e-6, found


def test_tensor_cores_cut_off() -> None:
    """What is 2^-25 of the largest is nothing, however often, and a sum is never rounded up."""
    a, b, c = np.zeros((1, 16, 16)), np.ones((1, 16, 8)), np.ones((1, 16, 8))
    a[0, 0], a[0, 1] = 2.0**-25, 2.0**-24
    assert tensor_core(a, b, c)[0, :2, 0].tolist() == [1, 1 + 2.0**-20]
    a[0, 1, 1:] = 0
    assert tensor_core(a, b, c)[0, 1, 0] == 1
