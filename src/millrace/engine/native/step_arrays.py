"""The arrays of a step as the native executor takes them: checked here where it cannot, then passed by address."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, ExecutionError, ExecutorLimits, StepInputs, StepOutputs, WindowPages
from millrace.kernels.library import StepArgs, WindowPagesArgs

_INT32, _UINT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32)


def step_args(step: StepInputs, limits: ExecutorLimits) -> tuple[StepArgs, StepOutputs]:
    """Return the arguments and the outputs of a step. raises ExecutionError

    The arguments hold addresses only: the caller keeps the step's arrays alive.
    """
    vocab_size = limits.vocab_size
    _check_arrays(step, vocab_size)
    windows = _window_args(step, limits) if step.windows or limits.windows else None
    states, n = step.states_of(limits), len(step.starts) - 1
    if states is not None:
        _check_rows(("states before", states.read, _INT32, n), ("states behind", states.write, _INT32, n))
    rows = len(step.sampling)
    top = min(max(int(step.sampling["n_top"].max()), 0), vocab_size) if rows else 0  # larger values are refused
    masks, ready, copies = step.masks, step.masks_ready, step.copies
    out = StepOutputs(
        tokens=np.zeros(rows, np.int32), logprobs=np.zeros(rows, np.float32), ranks=np.zeros(rows, np.int32),
        top_ids=np.zeros((rows, top), np.int32), top_logprobs=np.zeros((rows, top), np.float32),
    )  # fmt: skip
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
        masks=None if masks is None else masks.ctypes.data, n_masks=0 if masks is None else len(masks),
        masks_ready=None if ready is None else ready.ctypes.data,
        copies=None if copies is None else copies.ctypes.data, n_copies=0 if copies is None else len(copies),
        windows=windows, states_from=None if states is None else states.read.ctypes.data,
        states_to=None if states is None else states.write.ctypes.data,
        embeddings=None if step.embeddings is None else step.embeddings.ctypes.data,
        n_embeddings=0 if step.embeddings is None else len(step.embeddings),
        embedding_width=0 if step.embeddings is None else step.embeddings.shape[1],
        rotary_positions=None if step.rotary_positions is None else step.rotary_positions.ctypes.data,
        adapters=None if step.adapters is None else step.adapters.ctypes.data,
    )  # fmt: skip
    return args, out


def _window_args(step: StepInputs, limits: ExecutorLimits) -> Any:
    """Return an array of WindowPagesArgs. raises ExecutionError"""
    windows = step.windows_of(limits)
    if len(windows) != len(limits.windows):
        raise ExecutionError(f"an illegal step: pages of {len(windows)} windows, not of {len(limits.windows)}")
    for w in windows:
        _check_rows(
            ("a window's pages", w.pages, _INT32, None),
            ("a window's page_starts", w.page_starts, _INT32, len(step.starts)),
            ("a window's first", w.first, _INT32, len(step.starts) - 1),
        )  # fmt: skip
        _check_copies(w.copies)
    return (WindowPagesArgs * len(windows))(*map(_of_window, windows))


def _of_window(w: WindowPages) -> WindowPagesArgs:
    return WindowPagesArgs(
        pages=w.pages.ctypes.data, page_starts=w.page_starts.ctypes.data, first=w.first.ctypes.data,
        n_pages=len(w.pages), copies=None if w.copies is None else w.copies.ctypes.data,
        n_copies=0 if w.copies is None else len(w.copies),
    )  # fmt: skip


def _check_arrays(step: StepInputs, vocab_size: int) -> None:
    """Check arrays whose lengths and types the native executor cannot see. raises ExecutionError"""
    tokens, starts, biases = len(step.tokens), len(step.starts), len(step.bias_ids)
    _check_rows(
        ("tokens", step.tokens, _INT32, tokens), ("positions", step.positions, _INT32, tokens),
        ("starts", step.starts, _INT32, max(starts, 2)), ("page_starts", step.page_starts, _INT32, starts),
        ("pages", step.pages, _INT32, None), ("history", step.history, _INT32, None),
        ("bias_ids", step.bias_ids, _INT32, biases), ("bias_values", step.bias_values, _FLOAT32, biases),
        ("sampling", step.sampling, SAMPLING, None),
    )  # fmt: skip
    if step.rotary_positions is not None:
        _check_rows(("rotary positions", step.rotary_positions, _INT32, tokens))
    if step.adapters is not None:
        _check_rows(("adapters", step.adapters, _INT32, starts - 1))
    rows = step.embeddings
    if rows is not None and (rows.dtype != _FLOAT32 or rows.ndim != 2 or not rows.flags.c_contiguous):
        raise ExecutionError(f"an illegal step: embeddings are {rows.dtype}{list(rows.shape)}, not rows of float32")
    masks, words = step.masks, -(-vocab_size // 32)
    _check_copies(step.copies)
    if masks is not None and (masks.dtype != _UINT32 or masks.shape[1:] != (words,) or not masks.flags.c_contiguous):
        raise ExecutionError(f"an illegal step: masks are {masks.dtype}{list(masks.shape)}, not rows of {words} uint32")


def _check_rows(*arrays: tuple[str, NDArray[Any], np.dtype[Any], int | None]) -> None:
    """Check arrays. Each comes with its name and its expected type and length. raises ExecutionError"""
    for name, array, dtype, length in arrays:
        if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
            raise ExecutionError(f"an illegal step: {name} is {array.dtype}{list(array.shape)}, not a row of {dtype}")
        if length is not None and len(array) != length:
            raise ExecutionError(f"an illegal step: {name} has {len(array)} elements, not {length}")


def _check_copies(copies: NDArray[np.int32] | None) -> None:
    if copies is not None and (copies.dtype != _INT32 or copies.shape[1:] != (2,) or not copies.flags.c_contiguous):
        raise ExecutionError(f"an illegal step: copies are {copies.dtype}{list(copies.shape)}, not pairs of int32")
