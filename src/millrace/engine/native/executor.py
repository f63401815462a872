"""Programs in the native executor: it computes a whole run without the interpreter's lock.

An encoder's or tensor model's run is one call; a language model's step is launched and waited for.
"""

import ctypes
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.engine.cache_specs import PAGE_TOKENS, SLOTS_PER_SEQUENCE, CacheSpec, StateSpec, windows_of
from millrace.engine.executor import (
    ExecutionError,
    Executor,
    ExecutorLimits,
    StepInputs,
    StepOutputs,
    WindowLimits,
)
from millrace.engine.io_slots import DTYPES, Size, Slot, read_slot, sizes_of, slot, write_slot
from millrace.engine.native.program_sizes import largest, size_args
from millrace.engine.native.step_arrays import step_args
from millrace.errors import ConfigError, EngineError, MachineError, RequestError, nearest
from millrace.graph.types import Symbol
from millrace.kernels.declare import MAX_KNOBS
from millrace.kernels.library import (
    CacheArgs,
    CreateArgs,
    LanguageArgs,
    StateArgs,
    WindowArgs,
    bytes_at,
    library,
    usable_isas,
)
from millrace.machine.cpu import usable_cores

MAX_THREADS = 1024
TACTIC = np.dtype([("call", "<i4"), ("rows", "<i4"), ("knobs", "<i4", MAX_KNOBS)])  # mr_tactic
ERROR_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProgram:
    """What the native executor needs to run a program. weights: bytes, or a file that holds them"""

    calls: bytes
    n_calls: int
    weights: NDArray[np.uint8] | Path
    weights_bytes: int
    activation_bytes: int
    symbols: Mapping[Symbol, int]  # maximum of each
    sizes: tuple[Size, ...] = ()  # numbered after the symbols in calls
    inputs: tuple[Slot, ...] = ()
    outputs: tuple[Slot, ...] = ()
    caches: tuple[CacheSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()


def _refused(call: Callable[..., int], *arguments: object) -> str:
    """Return why the native executor refuses a call; "" if it does not."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    return error.value.decode(errors="replace") if call(*arguments, error, ERROR_BYTES) else ""


class _Core:
    """The native object of a program, released with the last reference to it.

    raises ExecutionError if the native executor refuses the program
    """

    def __init__(self, lib: ctypes.CDLL, args: CreateArgs) -> None:
        self.pointer = ctypes.c_void_p()
        self.works_on: list[object] = []  # arrays of the launched run, if any
        if refusal := _refused(lib.mr_create, ctypes.byref(args), ctypes.byref(self.pointer)):
            raise ExecutionError(refusal)
        released = weakref.finalize(self, _release, lib, self.pointer, os.getpid(), self.works_on)
        released.atexit = False  # a daemon thread's run may be unfinished; the system frees the memory


def _release(lib: ctypes.CDLL, pointer: ctypes.c_void_p, made_in: int, works_on: list[object]) -> None:
    """Release the native object. works_on: kept alive until then"""
    if os.getpid() == made_in:  # a forked child would wait forever for its parent's threads
        lib.mr_destroy(pointer)


class LoadedProgram:
    """The weights, activations and caches of one program. Threads that use it take turns.

    threads: how many compute, including the caller; None: one per core of this process
    raises ConfigError for a number of threads out of range, MachineError if this CPU lacks the instruction set,
    EngineError if the native executor refuses the program, or if inputs or outputs lie outside the activations.
    Every method raises EngineError after close(), and in a forked child
    """

    def __init__(
        self, program: NativeProgram, *, n_pages: int = 0, threads: int | None = None, isa: str | None = None,
        language: LanguageArgs | None = None, window_pages: Sequence[int] = (), n_slots: int = 0,
    ) -> None:  # fmt: skip
        self.threads = usable_cores() if threads is None else threads
        if not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"{threads} compute threads", f"1 to {MAX_THREADS}", "leave threads out for all cores")
        self._lib = library()
        self._turn, self._made_in = threading.RLock(), os.getpid()
        symbols = np.array(list(program.symbols.values()), np.int32)
        tokens = windows_of(program.caches)
        states = (StateArgs * len(program.states))(*(StateArgs(s.layers, s.floats) for s in program.states))
        windows = (WindowArgs * len(tokens))(*map(WindowArgs, tokens, window_pages))
        caches = (CacheArgs * len(program.caches))(*(_cache_args(cache, tokens) for cache in program.caches))
        derived_sizes = size_args(list(program.symbols), program.sizes)
        args = CreateArgs(
            program=program.calls, program_bytes=len(program.calls), weights_bytes=program.weights_bytes,
            activation_bytes=program.activation_bytes, symbols=symbols.ctypes.data, n_symbols=len(symbols),
            caches=caches, n_caches=len(caches), kv_pages=n_pages, windows=windows, n_windows=len(windows),
            states=states, n_states=len(states), state_slots=n_slots, sizes=derived_sizes, n_sizes=len(derived_sizes),
            threads=self.threads,
            isa=(isa or usable_isas()[0]).encode(), lengths_offset=_offset(program.inputs, "lengths"),
            language=None if language is None else ctypes.pointer(language),
        )  # fmt: skip
        if isinstance(program.weights, Path):
            args.weights_path = str(program.weights).encode()
        else:
            args.weights = program.weights.ctypes.data
        try:
            self._core: _Core | None = _Core(self._lib, args)
        except ExecutionError as error:
            refusal = str(error)
            if isa is not None and isa not in usable_isas():
                expected = "one of " + ", ".join(usable_isas())
                raise MachineError(refusal, expected, "leave --isa out, or choose one of them") from None
            raise EngineError(
                f"the engine cannot run: {refusal}",
                "a program and weights as `millrace build` writes them, and the memory that they ask for",
                "build the engine again, or free memory",
            ) from None
        _check_slots(program)
        self._program = replace(program, weights=np.zeros(0, np.uint8))  # the native executor has copied them
        name: bytes = self._lib.mr_isa(self._core.pointer)
        self.isa = name.decode()

    @contextmanager
    def _native(self) -> Iterator[ctypes.c_void_p]:
        """Lock the native object for a call, so that it is neither used by other threads nor released meanwhile."""
        if os.getpid() != self._made_in:  # before the lock, which a thread of the parent may have held at the fork
            raise EngineError(
                "this engine was loaded before the process was forked, and its threads are not in the child",
                "calls in the process that loaded it",
                'load it in each process, or start processes with multiprocessing.get_context("spawn")',
            )
        with self._turn:
            core = self._core
            if core is None:
                raise EngineError("this engine is closed", "calls before close()", "load it again")
            try:
                yield core.pointer
            finally:
                del core  # otherwise the traceback of an error would keep the memory alive

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "a loaded engine cannot be pickled or copied: it is threads and memory of this process",
            "the name of its folder",
            "send the name, and load it in the process that runs it",
        )

    def activations(self) -> NDArray[np.uint8]:
        """The planned arena. A reference to it keeps the memory alive, even after close()."""
        with self._native() as native:
            return bytes_at(self._lib.mr_activations(native) or 0, self._program.activation_bytes, self._core)

    def weights_checksum(self) -> int:
        with self._native() as native:
            return int(self._lib.mr_weights_checksum(native))

    def set_tactics(self, entries: Sequence[tuple[int, int, tuple[int, ...]]]) -> None:
        """Replace all tactics, given as (call, rows, knobs) in order of call, then rows. raises EngineError"""
        table = np.array(list(entries), TACTIC)
        with self._native() as native:
            refusal = _refused(self._lib.mr_set_tactics, native, table.ctypes.data, len(entries))
        if refusal:
            raise EngineError(
                f"the engine's tactics do not fit its program: {refusal}",
                "tactics.json as `millrace tune` writes it", "run `millrace tune` on the engine, or remove the file",
            )  # fmt: skip

    def chosen_tactics(self) -> NDArray[np.int32]:
        """Return the knobs (calls, knobs) that the last run used."""
        knobs = np.zeros((self._program.n_calls, MAX_KNOBS), np.int32)
        with self._native() as native:
            self._lib.mr_chosen_tactics(native, knobs.ctypes.data, len(knobs))
        return knobs

    def profile(self, enabled: bool) -> NDArray[np.float64]:
        """Return the seconds of each call since the last query (sampling last), then reset, or stop measuring."""
        seconds = np.zeros(self._program.n_calls + 1)
        with self._native() as native:
            self._lib.mr_profile(native, int(enabled), seconds.ctypes.data, len(seconds))
        return seconds

    def close(self) -> None:
        """Release the memory when the current run has ended. May be called twice."""
        if os.getpid() == self._made_in:
            with self._turn:
                self._core = None


def _cache_args(cache: CacheSpec, windows: Sequence[int]) -> CacheArgs:
    return CacheArgs(
        format=cache.format, layers=cache.layers, heads=cache.heads, key_dim=cache.key_size,
        value_dim=cache.value_size, place=-1 if cache.place is None else cache.place,
        table=windows.index(cache.window) + 1 if cache.place is None and cache.window else 0,
    )  # fmt: skip


def _offset(slots: Sequence[Slot], name: str) -> int:
    result = slot(slots, name)
    return -1 if result is None or result.offset is None else result.offset


def _check_slots(program: NativeProgram) -> None:
    """Check that inputs and outputs lie inside the activations."""
    for s in program.outputs:
        if s.offset is None:
            raise EngineError(f"the output {s.name} has no place", "a place in the activations", "build it again")
    for s in (*program.inputs, *program.outputs):
        end = (s.offset or 0) + largest(s, program.symbols, program.sizes) * DTYPES[s.dtype].itemsize
        if s.offset is not None and (s.offset < 0 or s.offset % 4 or end > program.activation_bytes):
            raise EngineError(
                f"{s.name} ends at byte {end} of {program.activation_bytes} of the activations",
                "inputs and outputs inside them", "build the engine again",
            )  # fmt: skip


class StatelessExecutor(LoadedProgram):
    """A program that keeps nothing between its runs: arrays in by name, arrays out by name."""

    def __init__(self, program: NativeProgram, *, threads: int | None = None, isa: str | None = None) -> None:
        super().__init__(program, threads=threads, isa=isa)

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Run the program and return copies of its outputs.

        raises RequestError for an input that is missing, unknown, or not of the declared shape, type and bounds
        """
        program = self._program
        sizes = sizes_of(program.inputs, program.symbols, inputs, program.sizes)
        with self._native():
            self._write(inputs)
            self.compute(list(sizes.values()))
            memory = self.activations()
            return {place.name: read_slot(memory, place, sizes) for place in self._program.outputs}

    def compute(self, sizes: Sequence[int]) -> None:
        """Run with the given symbols; the inputs are written already. raises RequestError, ExecutionError"""
        values = _checked_sizes(self._program.symbols, sizes)
        with self._native() as native:
            refusal = _refused(self._lib.mr_compute, native, values.ctypes.data)
        if refusal:
            raise ExecutionError(refusal)

    def _write(self, inputs: Mapping[str, NDArray[np.generic]]) -> None:
        memory = self.activations()
        for place in self._program.inputs:
            write_slot(memory, place, inputs[place.name])


def _checked_sizes(bounds: Mapping[Symbol, int], sizes: Sequence[int]) -> NDArray[np.int32]:
    """Check that there is one size per symbol, within its bound. raises RequestError"""
    try:
        integers = [operator.index(n) for n in sizes]
    except TypeError:  # for instance fractions
        integers = []
    if len(integers) != len(bounds) or not all(
        1 <= n <= high for n, high in zip(integers, bounds.values(), strict=True)
    ):
        expected = ", ".join(f"{symbol} from 1 to {high}" for symbol, high in bounds.items())
        raise RequestError(
            f"the sizes {sizes!r:.200}", f"whole numbers: {expected}", "give each symbol's, in this order"
        )
    return np.array(integers, np.int32)


class NativeExecutor(LoadedProgram, Executor):
    """The native executor of a language model, whose symbols are T, S and R, in this order. Its depth is 1.

    window_pages: pages of the caches of each window (`windows_of`); None: as many as of full attention
    n_slots: slots for states; None: as many as all sequences of a step can use
    """

    def __init__(
        self, program: NativeProgram, *, n_pages: int, max_context: int, vocab_size: int, threads: int | None = None,
        isa: str | None = None, window_pages: Sequence[int] | None = None, n_slots: int | None = None,
    ) -> None:  # fmt: skip
        own = [n_pages] * len(windows_of(program.caches)) if window_pages is None else window_pages
        sequences = program.symbols.get(Symbol("S"), 0)
        n_slots = (SLOTS_PER_SEQUENCE * sequences if n_slots is None else n_slots) if program.states else 0
        language = LanguageArgs(
            max_context=max_context, vocab_size=vocab_size,
            tokens_offset=_offset(program.inputs, "tokens"), positions_offset=_offset(program.inputs, "positions"),
            rows_offset=_offset(program.inputs, "rows"), adapters_offset=_offset(program.inputs, "adapters"),
            logits_offset=_offset(program.outputs, "logits"),
        )  # fmt: skip
        super().__init__(
            program, n_pages=n_pages, threads=threads, isa=isa, language=language, window_pages=own, n_slots=n_slots
        )
        with self._native() as native:
            width, adapters = int(self._lib.mr_embedding_width(native)), int(self._lib.mr_adapters(native))
        tokens, sequences, rows = program.symbols.values()  # otherwise the program was refused
        self._sizes: tuple[int, ...] = ()  # T, S and R of the last step
        self._outputs: StepOutputs | None = None  # of the launched step
        self.limits = ExecutorLimits(
            max_step_tokens=tokens, max_sequences=sequences, max_rows=rows,
            max_context=max_context, page_tokens=PAGE_TOKENS, n_pages=n_pages, vocab_size=vocab_size,
            on_all_cores=self.threads >= usable_cores(),
            windows=tuple(map(WindowLimits, windows_of(program.caches), own)), n_slots=n_slots, embedding_width=width,
            n_adapters=adapters - 1,
        )  # fmt: skip

    def kv_pages(self) -> list[NDArray[np.uint8]]:
        """The KV pages, (layers, pages, bytes) for each kept cache. A reference to them keeps the memory alive."""
        caches = [cache for cache in self._program.caches if cache.place is None]
        pages = {0: self.limits.n_pages, **{w.tokens: w.n_pages for w in self.limits.windows}}
        shapes = [(c.layers, pages[c.window], c.page_bytes() // c.layers) for c in caches]
        with self._native() as native:
            at = [self._lib.mr_kept(native, i) or 0 for i in range(len(caches))]
            pairs = zip(at, shapes, strict=True)
            return [bytes_at(a, math.prod(shape), self._core).reshape(shape) for a, shape in pairs]

    def launch(self, step: StepInputs) -> None:
        """Start a step on the executor's other threads. The calling thread joins them in `wait`."""
        args, out = step_args(step, self.limits)
        with self._native() as native:
            if self._outputs is not None:  # launched by any thread: its arrays must stay alive
                raise ExecutionError("the launched step was not waited for: this executor has a depth of 1")
            assert self._core is not None, "it is not closed"
            self._lib.mr_wait(native)  # for a step whose `wait` was interrupted, as by Ctrl-C
            self._core.works_on[:] = step, out
            if refusal := _refused(self._lib.mr_launch, native, ctypes.byref(args)):
                raise ExecutionError(refusal)
            self._sizes = (args.n_tokens, args.n_sequences, args.n_rows)
            self._outputs = out

    def wait(self) -> StepOutputs:
        """Wait for the launched step. raises ExecutionError if there is none

        An interrupted wait, as by Ctrl-C, abandons the step: the next one may be launched.
        """
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            raise ExecutionError("nothing was launched, so there is nothing to wait for")
        with self._native() as native:
            self._lib.mr_wait(native)
            assert self._core is not None, "it is not closed"
            self._core.works_on.clear()
        return outputs

    def output(self, name: str) -> NDArray[np.generic]:
        """Return an output of the last step: "logits" (R, V), or a module's result that the engine keeps."""
        assert self._sizes, "an output before a step"
        result = slot(self._program.outputs, name)
        if result is None:
            names = [s.name for s in self._program.outputs]
            raise ConfigError(f'the engine keeps no "{name}"', nearest(name, names), "build it with keep=")
        return read_slot(self.activations(), result, dict(zip(self._program.symbols, self._sizes, strict=True)))
