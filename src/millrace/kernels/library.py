"""Finds, loads and checks the native executor's shared library, through ctypes and native/millrace.h."""

import ctypes as c
import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.env import widest_isa
from millrace.errors import MachineError
from millrace.kernels.catalogue import declarations_digest

INTERFACE = (
    "c5ce1188d62813ae"  # digest of native/millrace.h, from which the structures below are copied (a test compares both)
)
NAME = "libmillrace.so"


class CacheArgs(c.Structure):
    """mr_cache"""

    _fields_ = (
        ("format", c.c_int32), ("layers", c.c_int32), ("heads", c.c_int32), ("key_dim", c.c_int32),
        ("value_dim", c.c_int32), ("place", c.c_int64), ("table", c.c_int32),
    )  # fmt: skip


class StateArgs(c.Structure):
    """mr_state"""

    _fields_ = (("layers", c.c_int32), ("floats", c.c_int32))


class WindowArgs(c.Structure):
    """mr_window"""

    _fields_ = (("tokens", c.c_int32), ("pages", c.c_int64))


class WindowPagesArgs(c.Structure):
    """mr_window_pages"""

    _fields_ = (
        ("pages", c.c_void_p), ("page_starts", c.c_void_p), ("first", c.c_void_p), ("n_pages", c.c_int64),
        ("copies", c.c_void_p), ("n_copies", c.c_int32),
    )  # fmt: skip


class SizeArgs(c.Structure):
    """mr_size"""

    _fields_ = tuple((name, c.c_int32) for name in ("kind", "left", "right", "add", "most"))


class LanguageArgs(c.Structure):
    """mr_language_model"""

    _fields_ = (
        ("max_context", c.c_int32), ("vocab_size", c.c_int32),
        ("tokens_offset", c.c_int64), ("positions_offset", c.c_int64), ("rows_offset", c.c_int64),
        ("adapters_offset", c.c_int64), ("logits_offset", c.c_int64),
    )  # fmt: skip


class CreateArgs(c.Structure):
    """mr_create_args"""

    _fields_ = (
        ("program", c.c_char_p), ("program_bytes", c.c_int64),
        ("weights", c.c_void_p), ("weights_bytes", c.c_int64), ("weights_path", c.c_char_p),
        ("activation_bytes", c.c_int64), ("symbols", c.c_void_p), ("n_symbols", c.c_int32),
        ("caches", c.POINTER(CacheArgs)), ("n_caches", c.c_int32), ("kv_pages", c.c_int64),
        ("threads", c.c_int32), ("isa", c.c_char_p),
        ("windows", c.POINTER(WindowArgs)), ("n_windows", c.c_int32),
        ("states", c.POINTER(StateArgs)), ("n_states", c.c_int32), ("state_slots", c.c_int64),
        ("lengths_offset", c.c_int64), ("language", c.POINTER(LanguageArgs)),
        ("sizes", c.POINTER(SizeArgs)), ("n_sizes", c.c_int32),
    )  # fmt: skip


class StepArgs(c.Structure):
    """mr_step"""

    _fields_ = (
        ("n_tokens", c.c_int32), ("n_sequences", c.c_int32), ("n_rows", c.c_int32),
        ("tokens", c.c_void_p), ("positions", c.c_void_p), ("starts", c.c_void_p),
        ("pages", c.c_void_p), ("page_starts", c.c_void_p), ("sampling", c.c_void_p),
        ("history", c.c_void_p), ("bias_ids", c.c_void_p), ("bias_values", c.c_void_p),
        ("n_pages", c.c_int64), ("n_history", c.c_int64), ("n_bias", c.c_int64),
        ("out_tokens", c.c_void_p), ("out_logprobs", c.c_void_p), ("out_ranks", c.c_void_p),
        ("max_top", c.c_int32), ("out_top_ids", c.c_void_p), ("out_top_logprobs", c.c_void_p),
        ("masks", c.c_void_p), ("n_masks", c.c_int32), ("masks_ready", c.c_void_p),
        ("copies", c.c_void_p), ("n_copies", c.c_int32), ("windows", c.POINTER(WindowPagesArgs)),
        ("states_from", c.c_void_p), ("states_to", c.c_void_p),
        ("embeddings", c.c_void_p), ("n_embeddings", c.c_int32), ("embedding_width", c.c_int32),
        ("rotary_positions", c.c_void_p), ("adapters", c.c_void_p),
    )  # fmt: skip


def library_path() -> Path:
    """Return the path: next to this file in a wheel; in site-packages in an editable install."""
    path = Path(__file__).parent / NAME
    if path.exists():
        return path
    try:
        installed = Path(str(importlib.metadata.distribution("millrace").locate_file(f"millrace/kernels/{NAME}")))
    except importlib.metadata.PackageNotFoundError:
        installed = path
    if not installed.exists():
        raise MachineError(
            f"the native core {NAME} is not built",
            "it lies beside the package",
            "run `make` in the source tree, or install the wheel",
        )
    return installed


def _check_build(lib: c.CDLL) -> None:
    """Check the build. raises MachineError for a library built from other sources, whose structures may differ"""
    expected, result = f"{INTERFACE} {declarations_digest()}", "none"
    if hasattr(lib, "mr_build"):
        lib.mr_build.restype = c.c_char_p
        result = lib.mr_build().decode()
    if result != expected:
        raise MachineError(
            f"{library_path()} was built from other sources than this Python package (digests {result})",
            f"digests {expected}", "rebuild it with `make`, or install the wheel again",
        )  # fmt: skip


@cache
def library() -> c.CDLL:
    """Load the library, and declare the signatures of millrace.h."""
    lib = c.CDLL(str(library_path()))
    _check_build(lib)
    lib.mr_isas.restype = c.c_char_p
    lib.mr_create.argtypes = [c.POINTER(CreateArgs), c.POINTER(c.c_void_p), c.c_char_p, c.c_int64]
    lib.mr_launch.argtypes = [c.c_void_p, c.POINTER(StepArgs), c.c_char_p, c.c_int64]
    lib.mr_wait.argtypes, lib.mr_wait.restype = [c.c_void_p], None
    lib.mr_compute.argtypes = [c.c_void_p, c.c_void_p, c.c_char_p, c.c_int64]
    lib.mr_set_tactics.argtypes = [c.c_void_p, c.c_void_p, c.c_int64, c.c_char_p, c.c_int64]
    lib.mr_destroy.argtypes, lib.mr_destroy.restype = [c.c_void_p], None
    lib.mr_chosen_tactics.argtypes, lib.mr_chosen_tactics.restype = [c.c_void_p, c.c_void_p, c.c_int32], None
    lib.mr_activations.argtypes, lib.mr_activations.restype = [c.c_void_p], c.c_void_p
    lib.mr_kept.argtypes, lib.mr_kept.restype = [c.c_void_p, c.c_int32], c.c_void_p
    lib.mr_isa.argtypes, lib.mr_isa.restype = [c.c_void_p], c.c_char_p
    lib.mr_embedding_width.argtypes, lib.mr_embedding_width.restype = [c.c_void_p], c.c_int32
    lib.mr_adapters.argtypes, lib.mr_adapters.restype = [c.c_void_p], c.c_int32
    lib.mr_weights_checksum.argtypes, lib.mr_weights_checksum.restype = [c.c_void_p], c.c_int64
    lib.mr_profile.argtypes, lib.mr_profile.restype = [c.c_void_p, c.c_int32, c.c_void_p, c.c_int32], None
    lib.mr_checksum.argtypes, lib.mr_checksum.restype = [c.c_void_p, c.c_int64], c.c_uint64
    rates = (c.c_double, c.c_int32, c.c_void_p, c.c_char_p, c.c_int64)  # round_s, rounds, rates, error, error_bytes
    lib.mr_probe_read.argtypes = (c.c_char_p, c.c_int32, c.c_int64, *rates)
    lib.mr_probe_rate.argtypes = (c.c_char_p, c.c_int32, c.c_int32, *rates)
    return lib


def usable_isas() -> list[str]:
    """Return the instruction sets that this build has and this CPU can run, widest first.

    MILLRACE_ISA hides those that are wider. raises MachineError if it names none of them
    """
    names: bytes = library().mr_isas()
    usable, widest = names.decode().split(), widest_isa()
    if widest is None:
        return usable
    if widest not in usable:
        raise MachineError(f"MILLRACE_ISA is {widest!r:.40}", "one of " + ", ".join(usable), "correct or unset it")
    return usable[usable.index(widest) :]


def bytes_at(address: int, n: int, owner: object) -> NDArray[np.uint8]:
    """Return native memory as an array, which keeps its owner alive."""
    buffer: Any = (c.c_uint8 * n).from_address(address)
    buffer.memory_of = owner
    return np.ctypeslib.as_array(buffer)
