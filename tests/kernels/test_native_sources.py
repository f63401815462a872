"""The C++ side says the same as the Python side, and keeps each instruction set to itself."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from millrace.kernels import codegen
from millrace.kernels.expression import OPERATIONS
from millrace.kernels.layout import byte_row_bytes, matrix_bytes, padded_k, row_bytes

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "millrace" / "kernels"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@needs_compiler
def test_layout_agrees(tmp_path: Path) -> None:
    """static_assert of the C++ functions against the values of the Python ones."""
    ks, groups = (1, 2, 7, 8, 9, 64, 100, 129, 4096), (0, 4, 12, 32, 128)
    lines = ['#include "layout.hpp"', "using namespace millrace;"]
    for k, group in itertools.product(ks, groups):
        lines.append(f"static_assert(padded_k({k}, {group}) == {padded_k(k, group)});")
        lines.append(f"static_assert(byte_row_bytes({k}, {group}) == {byte_row_bytes(k, group)});")
        for format in range(3):
            lines.append(f"static_assert(row_bytes({format}, {k}, {group}) == {row_bytes(format, k, group)});")
        for weights, n in itertools.product(range(4), (1, 33)):
            expected = matrix_bytes(weights, n, k, group)
            lines.append(f"static_assert(matrix_bytes({weights}, {n}, {k}, {group}) == {expected});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'native'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.parametrize("isa, flags", [("scalar", []), ("avx2", ["-mavx2", "-mfma", "-mf16c"])])
def test_isa_units_leak_nothing(isa: str, flags: list[str], tmp_path: Path) -> None:
    """A weak symbol outside of the unit's namespace could replace everybody's copy by one for this instruction set."""
    (tmp_path / "kernels_generated.hpp").write_text(codegen.header())
    unit = tmp_path / "unit.o"
    command = [
        "g++", "-std=c++20", "-O1", "-c", *flags, f"-DMILLRACE_ISA={isa}", f'-DMILLRACE_LANES="lanes/{isa}.hpp"',
        f"-I{ROOT / 'native'}", f"-I{KERNELS}", f"-I{tmp_path}", str(ROOT / "native" / "isa_unit.cpp"), "-o", str(unit),
    ]  # fmt: skip
    if isa == "avx2" and subprocess.run(["uname", "-m"], capture_output=True, text=True).stdout.strip() != "x86_64":
        pytest.skip("AVX2 is x86-64's")
    subprocess.run(command, check=True)
    listing = subprocess.run(["nm", "-C", str(unit)], capture_output=True, text=True, check=True).stdout
    weak = [line[17:] for line in listing.splitlines() if line[17:18] in "WVu" and f"millrace::{isa}::" not in line]
    assert not weak, weak


def test_operations_are_numbered_alike() -> None:
    text = (KERNELS / "elementwise" / "native.hpp").read_text()
    listed = text[text.index("enum class Op") :].split("{")[1].split("}")[0]
    assert tuple(name.strip() for name in listed.split(",")) == OPERATIONS
