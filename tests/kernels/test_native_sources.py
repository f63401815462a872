"""The C++ side says the same as the Python side, and keeps each instruction set to itself."""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from millrace.engine.executor import SAMPLING
from millrace.engine.native.executor import TACTIC
from millrace.errors import MachineError
from millrace.kernels import codegen
from millrace.kernels.catalogue import kernels
from millrace.kernels.declare import Scaling, WeightFormat
from millrace.kernels.expression import OPERATIONS
from millrace.kernels.layout import byte_row_bytes, matrix_bytes, padded_k, row_bytes
from millrace.kernels.library import INTERFACE, CacheArgs, CreateArgs, LanguageArgs, StepArgs, library, usable_isas

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "millrace" / "kernels"
INTERFACE_FILE = ROOT / "native" / "millrace.h"
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
        for weights, n in itertools.product(WeightFormat, (1, 33)):
            expected = matrix_bytes(weights, n, k, group)
            lines.append(f"static_assert(matrix_bytes({weights}, {n}, {k}, {group}) == {expected});")
    for k, group, scaling in itertools.product((1, 45, 256, 300, 1024), (16, 32), Scaling):
        expected = matrix_bytes(WeightFormat.W4, 33, k, group, scaling)
        lines.append(f"static_assert(matrix_bytes({WeightFormat.W4}, 33, {k}, {group}, {scaling}) == {expected});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'native'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_structures_agree(tmp_path: Path) -> None:
    """static_assert of the C++ structures against the ctypes ones, field by field."""
    codegen.write(tmp_path, INTERFACE_FILE)
    lines = ["#include <cstddef>", '#include "sampling.hpp"', '#include "millrace.h"', "using namespace millrace;"]
    structures: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
        "mr_create_args": ctypes_layout(CreateArgs), "mr_cache": ctypes_layout(CacheArgs),
        "mr_language_model": ctypes_layout(LanguageArgs),
        "mr_step": ctypes_layout(StepArgs),
        "SamplingRow": numpy_layout(SAMPLING), "mr_tactic": numpy_layout(TACTIC),
    }  # fmt: skip
    for name, (size, fields) in structures.items():
        lines.append(f"static_assert(sizeof({name}) == {size});")
        for field, (offset, width) in fields.items():
            lines.append(f"static_assert(offsetof({name}, {field}) == {offset});")
            lines.append(f"static_assert(sizeof({name}::{field}) == {width});")
    source = tmp_path / "structures.cpp"
    source.write_text("\n".join(lines))
    includes = [f"-I{ROOT / 'native'}", f"-I{KERNELS}", f"-I{tmp_path}"]
    done = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", *includes, str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(lines) > 4 + 2 * (17 + 19 + 18 + 3)


def ctypes_layout(structure: type[ctypes.Structure]) -> tuple[int, dict[str, tuple[int, int]]]:
    fields = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return ctypes.sizeof(structure), {name: (f.offset, f.size) for name, f in fields.items()}


def numpy_layout(dtype: np.dtype[np.void]) -> tuple[int, dict[str, tuple[int, int]]]:
    assert dtype.fields
    return dtype.itemsize, {name: (int(offset), kind.itemsize) for name, (kind, offset, *_) in dtype.fields.items()}


def test_the_interface_is_the_one_that_python_knows() -> None:
    """After a change of millrace.h: see that library.py still says the same, then write the new digest there."""
    assert codegen.interface_digest(INTERFACE_FILE) == INTERFACE


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.kernels.library.INTERFACE", "0123456789abcdef")
    with pytest.raises(MachineError, match="built from other sources"):
        library.__wrapped__()


@needs_compiler  # which brings nm
@pytest.mark.parametrize("isa", usable_isas())
def test_isa_units_leak_nothing(isa: str) -> None:
    """A weak symbol outside of the unit's namespace could replace everybody's copy by one for this instruction set.

    In the very objects of which the library was linked; `make` keeps them.
    """
    units = sorted(ROOT.glob(f"build/*/CMakeFiles/isa_{isa}.dir/native/*.o"))
    assert {unit.name for unit in units} == {"isa_unit.cpp.o", "probe_unit.cpp.o"}, "build it with `make`"
    for unit in units:
        listing = subprocess.run(["nm", "-C", str(unit)], capture_output=True, text=True, check=True).stdout
        symbols = [line[17:] for line in listing.splitlines()]
        assert any(isa in symbol for symbol in symbols), unit
        weak = [symbol for symbol in symbols if symbol[:1] in "WVu" and f"millrace::{isa}::" not in symbol]
        assert weak in ([], ["V DW.ref.__gxx_personality_v0"]), weak  # data: where the C++ runtime's function lies


@needs_compiler
@pytest.mark.parametrize("kernel", [k.name for k in kernels()])
def test_a_kernel_includes_what_it_uses(kernel: str, tmp_path: Path) -> None:
    """So that no file has to know in which order they belong."""
    codegen.write(tmp_path, INTERFACE_FILE)
    needs = ["isa.hpp", "lanes/scalar.hpp", "lanes/math.hpp", "lanes/rows.hpp", f"{kernel}/native.hpp"]
    (tmp_path / "alone.cpp").write_text("".join(f'#include "{file}"\n' for file in needs))
    includes = [f"-I{ROOT / 'native'}", f"-I{KERNELS}", f"-I{tmp_path}"]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-DMILLRACE_ISA=scalar", *includes, str(tmp_path / "alone.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_operations_are_numbered_alike() -> None:
    text = (KERNELS / "elementwise" / "native.hpp").read_text()
    listed = text[text.index("enum class Op") :].split("{")[1].split("}")[0]
    assert tuple(name.strip() for name in listed.split(",")) == OPERATIONS
