"""AMX's kernels on machines without AMX: a library of the same sources with emulated instructions, built on demand.

It shows what the kernels compute and that the hardware would allow each instruction, not how long they take.
Nothing of it is in a wheel, and the product's own library does not know its instruction set.
"""

import ctypes
import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from millrace.engine.native import executor
from millrace.engine.native.executor import LoadedProgram, NativeProgram
from millrace.kernels.library import library, usable_isas

ROOT = Path(__file__).parents[2]
EMULATED = "amx_emulated"
KERNEL_ISAS = (*usable_isas(), EMULATED)  # for whatever loads programs within `emulation`
TILED_ISAS = tuple(isa for isa in KERNEL_ISAS if isa.startswith("amx"))  # whose kernels use tiles
_NAME = "libmillrace_emulated.so"
_FAULT_BYTES = 256


def _built() -> Path:
    """The library, in the build folder, where later runs find it; CMake and Ninja say whether it is out of date."""
    tools = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    cmake, compiler = shutil.which("cmake", path=tools), shutil.which("g++")
    if cmake is None or compiler is None or shutil.which("ninja", path=tools) is None:
        pytest.skip("no g++, cmake and ninja here")
    lanes = "avx2" if b"avx2" in library().mr_isas().split() else "scalar"  # of the CPU, whatever is hidden
    folder = ROOT / "build" / "emulated-amx" / lanes
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # processes of one run, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _configured(folder):
            _run(
                cmake, "--fresh", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=tools)}",
                f"-DPython3_EXECUTABLE={sys.executable}", f"-DMILLRACE_EMULATED_ON={lanes}",
            )  # fmt: skip
        _run(cmake, "--build", folder, "--target", "millrace_emulated")
    return folder / _NAME


def _configured(folder: Path) -> bool:
    """Whether CMake has prepared it for this very checkout."""
    cached = folder / "CMakeCache.txt"
    home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cached.read_text(), re.M) if cached.exists() else None
    return home is not None and Path(home[1]) == ROOT and (folder / "build.ninja").exists()


def _run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def emulated_library() -> ctypes.CDLL:
    """The loaded library: the product's interface, with this instruction set alone, and single instructions."""
    path = _built()
    with patch("millrace.kernels.library.library_path", return_value=path):
        lib: ctypes.CDLL = library.__wrapped__()
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    signatures: dict[str, tuple[Any, ...]] = {
        "emulated_fault": (ctypes.c_char_p, i64), "emulated_loadconfig": (pointer,),
        "emulated_loadd": (i32, pointer, i64), "emulated_stored": (i32, pointer, i64), "emulated_zero": (i32,),
        "emulated_release": (), "emulated_product": (i32,) * 4, "hardware_product": (i32, *(pointer,) * 4),
    }  # fmt: skip
    for name, arguments in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, i32 if name.startswith("hardware") else None
    return lib


def fault() -> str:
    """The first fault since the last call, which forgets it: instruction, #GP or #UD, reason. Empty: there was none."""
    message = ctypes.create_string_buffer(_FAULT_BYTES)
    emulated_library().emulated_fault(message, _FAULT_BYTES)
    return message.value.decode()


@contextmanager
def emulation() -> Iterator[None]:
    """Load programs for EMULATED into its library. At the end, fail if the hardware would have raised a fault."""
    load = LoadedProgram.__init__

    def loaded(self: LoadedProgram, program: NativeProgram, *, isa: str | None = None, **options: Any) -> None:
        if isa != EMULATED:
            return load(self, program, isa=isa, **options)
        with (
            patch.object(executor, "library", emulated_library),
            patch.object(executor, "usable_isas", lambda: [EMULATED]),
        ):
            return load(self, program, isa=isa, **options)

    with patch.object(LoadedProgram, "__init__", loaded):
        yield
    if emulated_library.cache_info().currsize and (why := fault()):
        pytest.fail(f"the hardware would have raised a fault: {why}", pytrace=False)
