"""Programs in the native core: a whole run as one call into C++ that releases the interpreter's lock."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.engine.kv import CacheSpec
from millrace.engine.slots import Slot, slot
from millrace.errors import ConfigError, EngineError, MachineError, RequestError
from millrace.graph.types import DType, Symbol
from millrace.kernels.declare import MAX_KNOBS
from millrace.kernels.library import CacheArgs, CreateArgs, library, usable_isas
from millrace.machine.cpu import usable_cores

MAX_THREADS = 1024
TACTIC = np.dtype([("step", "<i4"), ("rows", "<i4"), ("knobs", "<i4", MAX_KNOBS)])  # mr_tactic
ERROR_BYTES = 1024
DTYPES = {DType.F32: np.dtype(np.float32), DType.I32: np.dtype(np.int32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProgram:
    """What the native core needs to run a program; `weights` are bytes, or a file that holds them.

    vocab_size, max_context: of a language model; 0 for any other network
    """

    calls: bytes
    n_calls: int
    weights: NDArray[np.uint8] | Path
    weights_bytes: int
    activation_bytes: int
    symbols: Mapping[Symbol, int]  # how large each may be
    inputs: tuple[Slot, ...] = ()
    outputs: tuple[Slot, ...] = ()
    caches: tuple[CacheSpec, ...] = ()
    max_context: int = 0
    vocab_size: int = 0


class ExecutionError(RuntimeError):
    """A run was refused or failed in the native core; the message says why."""


class LoadedProgram:
    """Owns the weights, activations and caches of one program. It runs in one thread at a time.

    threads: how many compute, the caller's among them; None: as many as this process has cores
    raises ConfigError for a number of threads out of range, MachineError for an instruction set that this CPU lacks,
    EngineError for whatever else the native core refuses
    """

    def __init__(
        self, program: NativeProgram, *, n_pages: int = 0, threads: int | None = None, isa: str | None = None
    ) -> None:
        self.threads = usable_cores() if threads is None else threads
        if not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"{threads} compute threads", f"1 to {MAX_THREADS}", "leave threads out for all cores")
        self._lib = library()
        self._handle = ctypes.c_void_p()
        self._program = program
        symbols = np.array(list(program.symbols.values()), np.int32)
        caches = (CacheArgs * len(program.caches))(*map(_cache_args, program.caches))
        args = CreateArgs(
            program=program.calls, program_bytes=len(program.calls), weights_bytes=program.weights_bytes,
            activation_bytes=program.activation_bytes, symbols=symbols.ctypes.data, n_symbols=len(symbols),
            caches=caches, n_caches=len(caches), kv_pages=n_pages, threads=self.threads,
            isa=isa.encode() if isa else None, max_context=program.max_context, vocab_size=program.vocab_size,
            lengths_offset=_offset(program.inputs, "lengths"), tokens_offset=_offset(program.inputs, "tokens"),
            positions_offset=_offset(program.inputs, "positions"), rows_offset=_offset(program.inputs, "rows"),
            logits_offset=_offset(program.outputs, "logits"),
        )  # fmt: skip
        if isinstance(program.weights, Path):
            args.weights_path = str(program.weights).encode()
        else:
            args.weights = program.weights.ctypes.data
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if self._lib.mr_create(ctypes.byref(args), ctypes.byref(self._handle), error, ERROR_BYTES):
            why = error.value.decode(errors="replace")
            if isa is not None and isa not in usable_isas():
                raise MachineError(why, "one of " + ", ".join(usable_isas()), "leave --isa out, or choose one of them")
            raise EngineError(
                f"the engine cannot run: {why}",
                "a program and weights as `millrace build` writes them, and the memory that they ask for",
                "build the engine again, or free memory",
            )

    @property
    def isa(self) -> str:
        name: bytes = self._lib.mr_isa(self._handle)
        return name.decode()

    def activations(self) -> NDArray[np.uint8]:
        """The planned arena itself, for tests and the inspector."""
        address = self._lib.mr_activations(self._handle)
        buffer = (ctypes.c_uint8 * self._program.activation_bytes).from_address(address)
        return np.ctypeslib.as_array(buffer)

    def weights_checksum(self) -> int:
        return int(self._lib.mr_weights_checksum(self._handle))

    def set_tactics(self, entries: Sequence[tuple[int, int, tuple[int, ...]]]) -> None:
        """(step, rows, knobs) in order of step, then rows; replaces all. raises EngineError for what no kernel takes"""
        table = np.array(list(entries), TACTIC)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if self._lib.mr_set_tactics(self._handle, table.ctypes.data, len(entries), error, ERROR_BYTES):
            raise EngineError(
                f"the engine's tactics do not fit its program: {error.value.decode(errors='replace')}",
                "tactics.json as `millrace tune` writes it", "run `millrace tune` on the engine, or remove the file",
            )  # fmt: skip

    def chosen_tactics(self) -> NDArray[np.int32]:
        """(steps, knobs) that the last run worked with."""
        knobs = np.zeros((self._program.n_calls, MAX_KNOBS), np.int32)
        self._lib.mr_chosen_tactics(self._handle, knobs.ctypes.data, len(knobs))
        return knobs

    def profile(self, enabled: bool) -> NDArray[np.float64]:
        """Seconds each step of the program took since the last call (sampling last); then measures anew, or not."""
        seconds = np.zeros(self._program.n_calls + 1)
        self._lib.mr_profile(self._handle, int(enabled), seconds.ctypes.data, len(seconds))
        return seconds

    def close(self) -> None:
        if self._handle:
            self._lib.mr_destroy(self._handle)
            self._handle = ctypes.c_void_p()


def _cache_args(cache: CacheSpec) -> CacheArgs:
    return CacheArgs(
        format=cache.format, layers=cache.layers, heads=cache.heads, key_dim=cache.key_size,
        value_dim=cache.value_size, place=-1 if cache.place is None else cache.place,
    )  # fmt: skip


def _offset(slots: Sequence[Slot], name: str) -> int:
    found = slot(slots, name)
    return -1 if found is None or found.offset is None else found.offset


class NativeNetwork(LoadedProgram):
    """A network that keeps nothing between its runs: arrays in by name, arrays out by name.

    raises what LoadedProgram raises, and EngineError for inputs or outputs that lie outside the activations
    """

    def __init__(self, program: NativeProgram, *, threads: int | None = None, isa: str | None = None) -> None:
        for s in (*program.inputs, *program.outputs):
            end = (s.offset or 0) + math.prod(s.sized(program.symbols)) * DTYPES[s.dtype].itemsize
            outside = s.offset is not None and (s.offset < 0 or s.offset % 4 or end > program.activation_bytes)
            if outside or (s.offset is None and s in program.outputs):
                raise EngineError(
                    f"{s.name} ends at byte {end} of {program.activation_bytes} of the activations",
                    "inputs and outputs inside them", "build the engine again",
                )  # fmt: skip
        super().__init__(program, threads=threads, isa=isa)

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Its outputs, as arrays of their own.

        raises RequestError for an input that is missing, unknown, or not of the shape, type and bounds it was built for
        """
        assert self._handle, "a run after close"
        sizes = sizes_of(self._program.inputs, self._program.symbols, inputs)
        memory = self.activations()
        for place in self._program.inputs:
            if place.offset is not None:
                data = np.ascontiguousarray(inputs[place.name]).reshape(-1).view(np.uint8)
                memory[place.offset : place.offset + data.size] = data
        self.compute(list(sizes.values()))
        return {place.name: read_slot(memory, place, sizes) for place in self._program.outputs}

    def compute(self, sizes: Sequence[int]) -> None:
        """A run of so many rows of each symbol, its inputs written already. raises ExecutionError"""
        assert len(sizes) == len(self._program.symbols), sizes
        given = np.array(sizes, np.int32)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if self._lib.mr_compute(self._handle, given.ctypes.data, error, ERROR_BYTES):
            raise ExecutionError(error.value.decode(errors="replace"))


def read_slot(memory: NDArray[np.uint8], place: Slot, sizes: Mapping[Symbol, int]) -> NDArray[np.generic]:
    """A copy of what lies there after a run of so many rows of each symbol."""
    shape, dtype = place.sized(sizes), DTYPES[place.dtype]
    assert place.offset is not None, place
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[place.offset : place.offset + nbytes].view(dtype).reshape(shape).copy()


def sizes_of(
    slots: Sequence[Slot], bounds: Mapping[Symbol, int], inputs: Mapping[str, NDArray[np.generic]]
) -> dict[Symbol, int]:
    """What the symbols are, by the shapes of the inputs; in the order of `bounds`.

    raises RequestError for an input that is missing, unknown, or not of the shape, type and bounds it was built for
    """
    names = [s.name for s in slots]
    for name in [n for n in names if n not in inputs] + [n for n in inputs if n not in names]:
        what = "is missing" if name in names else "is none of this network's"
        raise RequestError(f"the input {name!r:.60} {what}", "inputs " + ", ".join(names), "give each of them, by name")
    found: dict[Symbol, int] = {}
    for s in slots:
        array = inputs[s.name]
        expected = [found.get(d, d) if isinstance(d, Symbol) else d for d in s.shape]
        fits = array.dtype == DTYPES[s.dtype] and len(array.shape) == len(expected)
        for given, asked in zip(array.shape, expected, strict=False):
            if isinstance(asked, Symbol):
                found[asked] = given
            fits = fits and (1 <= given <= bounds[asked] if isinstance(asked, Symbol) else given == asked)
        if not fits:
            limits = ", ".join(f"{d} from 1 to {bounds[d]}" for d in expected if isinstance(d, Symbol))
            raise RequestError(
                f"the input {s.name} is {array.dtype}{list(array.shape)}",
                f"{DTYPES[s.dtype]}{expected}" + (f", {limits}" if limits else ""), "change the input's shape or type",
            )  # fmt: skip
    return {symbol: found[symbol] for symbol in bounds}
