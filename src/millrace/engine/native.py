"""The native executor: the whole step, sampling included, in one call into C++ that releases the interpreter's lock."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, ExecutorLimits, StepInputs, StepOutputs
from millrace.errors import ConfigError, EngineError, MachineError
from millrace.kernels.declare import MAX_KNOBS
from millrace.kernels.library import CreateArgs, StepArgs, library, usable_isas
from millrace.machine.cpu import usable_cores

PAGE_TOKENS = 64
MAX_THREADS = 1024
TACTIC = np.dtype([("step", "<i4"), ("rows", "<i4"), ("knobs", "<i4", MAX_KNOBS)])  # mr_tactic
_ERROR_BYTES = 1024
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class KvFormat(IntEnum):
    F32 = 0
    BF16 = 1
    INT8 = 2  # with a float32 scale for each token and head


KV_CACHE_DTYPES = {"fp32": KvFormat.F32, "bf16": KvFormat.BF16, "int8": KvFormat.INT8}  # as users name them
_KV_BYTES = {KvFormat.F32: 4, KvFormat.BF16: 2, KvFormat.INT8: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Keys and values of one token: layers x heads x head_dim, in one format."""

    layers: int
    heads: int
    head_dim: int
    format: KvFormat

    def page_bytes(self) -> int:
        """Bytes of one page over all layers: keys [D][64] and values [64][D up to 16] of each KV head."""
        width = self.head_dim + (self.head_dim + 15) // 16 * 16
        scales = 2 * 4 if self.format == KvFormat.INT8 else 0
        return self.layers * self.heads * PAGE_TOKENS * (width * _KV_BYTES[self.format] + scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProgram:
    """What the native core needs to run a program; `weights` are bytes, or a file that holds them."""

    steps: bytes
    n_steps: int
    weights: NDArray[np.uint8] | Path
    weights_bytes: int
    activation_bytes: int
    logits_offset: int  # -1: nothing is sampled
    max_step_tokens: int
    max_sequences: int
    max_context: int
    vocab_size: int
    kv: KvShape


class ExecutionError(RuntimeError):
    """A step was refused or failed in the native core; the message says why."""


class NativeExecutor:
    """Owns the weights, activations and KV pages of one engine. `run` may be called from one thread at a time.

    threads: how many compute, the caller's among them; None: as many as this process has cores
    raises ConfigError for a number of threads out of range, MachineError for an instruction set that this CPU lacks,
    EngineError for whatever else the native core refuses
    """

    def __init__(
        self, program: NativeProgram, *, n_pages: int, threads: int | None = None, isa: str | None = None
    ) -> None:
        self.threads = usable_cores() if threads is None else threads
        if not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"{threads} compute threads", f"1 to {MAX_THREADS}", "leave threads out for all cores")
        self._lib = library()
        self._handle = ctypes.c_void_p()
        self._program = program
        args = CreateArgs(
            program=program.steps, program_bytes=len(program.steps), weights_bytes=program.weights_bytes,
            activation_bytes=program.activation_bytes, logits_offset=program.logits_offset,
            max_tokens=program.max_step_tokens, max_sequences=program.max_sequences,
            max_context=program.max_context, vocab_size=program.vocab_size,
            kv_format=program.kv.format, kv_layers=program.kv.layers, kv_heads=program.kv.heads,
            kv_head_dim=program.kv.head_dim, kv_pages=n_pages, threads=self.threads,
            isa=isa.encode() if isa else None,
        )  # fmt: skip
        if isinstance(program.weights, Path):
            args.weights_path = str(program.weights).encode()
        else:
            args.weights = program.weights.ctypes.data
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._lib.mr_create(ctypes.byref(args), ctypes.byref(self._handle), error, _ERROR_BYTES):
            why = error.value.decode(errors="replace")
            if isa is not None and isa not in usable_isas():
                raise MachineError(why, "one of " + ", ".join(usable_isas()), "leave --isa out, or choose one of them")
            raise EngineError(
                f"the engine cannot run: {why}",
                "a program and weights as `millrace build` writes them, and the memory that they ask for",
                "build the engine again, or free memory",
            )
        self.limits = ExecutorLimits(
            max_step_tokens=program.max_step_tokens,
            max_sequences=program.max_sequences,
            max_context=program.max_context,
            page_tokens=PAGE_TOKENS,
            n_pages=n_pages,
            vocab_size=program.vocab_size,
        )

    @property
    def isa(self) -> str:
        name: bytes = self._lib.mr_isa(self._handle)
        return name.decode()

    def run(self, step: StepInputs) -> StepOutputs:
        assert self._handle, "a step after close"
        _check_arrays(step)
        rows = len(step.sampling)
        most = self._program.vocab_size  # more than that the native core refuses
        top = min(max(int(step.sampling["n_top"].max()), 0), most) if rows else 0
        out = StepOutputs(
            tokens=np.zeros(rows, np.int32),
            logprobs=np.zeros(rows, np.float32),
            ranks=np.zeros(rows, np.int32),
            top_ids=np.zeros((rows, top), np.int32),
            top_logprobs=np.zeros((rows, top), np.float32),
        )
        args = StepArgs(
            n_tokens=len(step.tokens), n_sequences=len(step.starts) - 1, n_rows=rows,
            tokens=step.tokens.ctypes.data, positions=step.positions.ctypes.data, starts=step.starts.ctypes.data,
            pages=step.pages.ctypes.data, page_starts=step.page_starts.ctypes.data,
            sampling=step.sampling.ctypes.data, history=step.history.ctypes.data,
            bias_ids=step.bias_ids.ctypes.data, bias_values=step.bias_values.ctypes.data,
            n_pages=len(step.pages), n_history=len(step.history), n_bias=len(step.bias_ids),
            out_tokens=out.tokens.ctypes.data, out_logprobs=out.logprobs.ctypes.data,
            out_ranks=out.ranks.ctypes.data, max_top=top,
            out_top_ids=out.top_ids.ctypes.data, out_top_logprobs=out.top_logprobs.ctypes.data,
        )  # fmt: skip
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._lib.mr_run(self._handle, ctypes.byref(args), error, _ERROR_BYTES):
            raise ExecutionError(error.value.decode(errors="replace"))
        return out

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
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._lib.mr_set_tactics(self._handle, table.ctypes.data, len(entries), error, _ERROR_BYTES):
            raise EngineError(
                f"the engine's tactics do not fit its program: {error.value.decode(errors='replace')}",
                "tactics.json as `millrace tune` writes it", "run `millrace tune` on the engine, or remove the file",
            )  # fmt: skip

    def chosen_tactics(self) -> NDArray[np.int32]:
        """(steps, knobs) that the last run worked with."""
        knobs = np.zeros((self._program.n_steps, MAX_KNOBS), np.int32)
        self._lib.mr_chosen_tactics(self._handle, knobs.ctypes.data, len(knobs))
        return knobs

    def profile(self, enabled: bool) -> NDArray[np.float64]:
        """Seconds each step of the program took since the last call (sampling last); then measures anew, or not."""
        seconds = np.zeros(self._program.n_steps + 1)
        self._lib.mr_profile(self._handle, int(enabled), seconds.ctypes.data, len(seconds))
        return seconds

    def close(self) -> None:
        if self._handle:
            self._lib.mr_destroy(self._handle)
            self._handle = ctypes.c_void_p()


def _check_arrays(step: StepInputs) -> None:
    """What the native core cannot see of arrays given by their addresses. raises ExecutionError"""
    tokens, starts, biases = len(step.tokens), len(step.starts), len(step.bias_ids)
    for name, array, dtype, length in (
        ("tokens", step.tokens, _INT32, tokens), ("positions", step.positions, _INT32, tokens),
        ("starts", step.starts, _INT32, max(starts, 2)), ("page_starts", step.page_starts, _INT32, starts),
        ("pages", step.pages, _INT32, None), ("history", step.history, _INT32, None),
        ("bias_ids", step.bias_ids, _INT32, biases), ("bias_values", step.bias_values, _FLOAT32, biases),
        ("sampling", step.sampling, SAMPLING, None),
    ):  # fmt: skip
        if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
            raise ExecutionError(f"an illegal step: {name} is {array.dtype}{list(array.shape)}, not a row of {dtype}")
        if length is not None and len(array) != length:
            raise ExecutionError(f"an illegal step: {name} has {len(array)} elements, not {length}")
