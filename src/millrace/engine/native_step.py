"""The native executor of a language model: a step, sampling included, in one call."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, Executor, ExecutorLimits, StepInputs, StepOutputs
from millrace.engine.kv import PAGE_TOKENS
from millrace.engine.native import ERROR_BYTES, ExecutionError, LoadedProgram, NativeProgram, read_slot
from millrace.engine.slots import slot
from millrace.errors import ConfigError, nearest
from millrace.kernels.library import StepArgs

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class NativeExecutor(LoadedProgram, Executor):
    """`program` is a language model's: its symbols are T, S and R, in this order. Its depth is 1."""

    def __init__(
        self, program: NativeProgram, *, n_pages: int, threads: int | None = None, isa: str | None = None
    ) -> None:
        super().__init__(program, n_pages=n_pages, threads=threads, isa=isa)
        tokens, sequences, rows = program.symbols.values()
        self._sizes: tuple[int, ...] = ()  # T, S and R of the last step
        self._outputs: StepOutputs | None = None  # of the step that was launched
        self.limits = ExecutorLimits(
            max_step_tokens=tokens, max_sequences=sequences, max_rows=rows,
            max_context=program.max_context, page_tokens=PAGE_TOKENS, n_pages=n_pages, vocab_size=program.vocab_size,
        )  # fmt: skip

    def launch(self, step: StepInputs) -> None:
        """Returns when the step is through: on a CPU nobody else could do it. The interpreter's lock is released."""
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
        error = ctypes.create_string_buffer(ERROR_BYTES)
        with self._native() as native:
            refused = self._lib.mr_run(native, ctypes.byref(args), error, ERROR_BYTES)
        if refused:
            raise ExecutionError(error.value.decode(errors="replace"))
        self._sizes = (args.n_tokens, args.n_sequences, rows)
        self._outputs = out

    def wait(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, None
        assert outputs is not None, "nothing was launched"
        return outputs

    def output(self, name: str) -> NDArray[np.generic]:
        """What the last step gave under this name: "logits" (R, V), or a module's result that the engine keeps."""
        assert self._sizes, "an output before a step"
        found = slot(self._program.outputs, name)
        if found is None:
            known = [s.name for s in self._program.outputs]
            raise ConfigError(f'the engine keeps no "{name}"', nearest(name, known), "build it with keep=")
        return read_slot(self.activations(), found, dict(zip(self._program.symbols, self._sizes, strict=True)))


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
