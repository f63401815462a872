"""Runs steps of a language model through Hugging Face transformers in PyTorch: the fallback for any architecture.

It is slow: one forward pass per sequence and step, and sampling in NumPy. The keys and values of a sequence are
transformers' own cache object. The KV pages that the scheduler gives out bound its memory, and the state slots of a
step say which sequence is which.
"""

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from millrace.engine.executor import ExecutionError, Executor, ExecutorLimits, StepInputs, StepOutputs
from millrace.engine.reference.sampling import sample_step
from millrace.kernels.operators import Rows

CACHE_NAMES = ("cache", "past_key_values")
# what the code of a model raises for inputs that it does not handle
_MODEL_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)
_PROBE = (5, 4, 1, 2, 1)  # tokens of the chunks that check whether a model continues from its cache
_PROBE_TOLERANCE = 0.02  # of the largest logit: what bfloat16 may change


@dataclass(slots=True)
class _Sequence:
    """The tokens of a sequence so far, and transformers' cache of them. slot: in which its state is"""

    tokens: list[int]
    cache: Any
    slot: int


class TransformersExecutor(Executor):
    """Executor of a causal language model of transformers, in evaluation mode."""

    def __init__(self, model: Any, limits: ExecutorLimits, threads: int) -> None:
        """limits: with two state slots per sequence. threads: of PyTorch, for the whole process"""
        assert limits.n_slots and not limits.windows and not limits.embedding_width, limits
        self.limits = limits
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        # what forward takes and returns: `cache` since transformers 5.20, `past_key_values` before
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), None)
        self._sequences: dict[int, _Sequence] = {}  # by slot
        self._step: StepInputs | None = None
        torch.set_num_threads(threads)
        self.keeps_cache = self._cache_name is not None and self._continues_from_cache()

    def launch(self, step: StepInputs) -> None:
        self._step = step

    def wait(self) -> StepOutputs:
        step, self._step = self._step, None
        assert step is not None, "no step was launched"
        try:
            with torch.inference_mode():
                logits = self._logits(step)
        except _MODEL_ERRORS as error:
            raise ExecutionError(f"transformers failed: {type(error).__name__}: {error}") from error
        return sample_step(step, logits)

    def close(self) -> None:
        self._sequences.clear()
        self._model = None

    def _logits(self, step: StepInputs) -> list[Rows]:
        """The logits (V,) of each sampling row, in float64."""
        rows: list[Rows] = [np.zeros(0)] * len(step.sampling)
        states = step.states_of(self.limits)
        assert states is not None, "there are slots"
        for s, (start, end) in enumerate(pairwise(step.starts.tolist())):
            sampled = [(r, at - start) for r, at in enumerate(step.sampling["token"].tolist()) if start <= at < end]
            sequence = self._at(int(states.read[s]), int(states.write[s]), int(step.positions[start]))
            logits = self._forward(sequence, step.tokens[start:end].tolist(), sorted({at for _, at in sampled}))
            for r, at in sampled:
                rows[r] = logits[at]
        return rows

    def _at(self, read: int, write: int, n_tokens: int) -> _Sequence:
        """Return the sequence whose state is in slot `read`, cut to `n_tokens`, and move it to slot `write`."""
        previous = self._sequences.get(read)
        if not n_tokens:
            sequence = _Sequence([], None, write)
        elif previous is None or len(previous.tokens) < n_tokens:
            raise ExecutionError(f"slot {read} has no state of {n_tokens} tokens")
        elif previous.slot == read and len(previous.tokens) == n_tokens:
            sequence = previous
            sequence.slot = write
        else:  # another sequence has continued it, or the step is repeated: its cache is beyond this point
            sequence = _Sequence(previous.tokens[:n_tokens], None, write)
        self._sequences[write] = sequence
        return sequence

    def _forward(self, sequence: _Sequence, tokens: list[int], sampled: list[int]) -> dict[int, Rows]:
        """Append tokens to the sequence; return the logits after the sampled ones, by their index in `tokens`."""
        ids = tokens if sequence.cache is not None else [*sequence.tokens, *tokens]
        cache, sequence.cache = sequence.cache, None  # if this fails, the cache is in an unknown state
        keep = [len(ids) - len(tokens) + at for at in sampled]
        continued = {self._cache_name: cache} if self._cache_name and cache is not None else {}
        out = self._model(
            input_ids=torch.tensor([ids]), use_cache=self.keeps_cache,
            logits_to_keep=torch.tensor(keep, dtype=torch.int64), **continued,
        )  # fmt: skip
        sequence.tokens += tokens
        if self.keeps_cache and self._cache_name is not None:
            sequence.cache = getattr(out, self._cache_name, None)
        logits = out.logits[0]
        if len(logits) == len(ids) != len(keep):  # a model that does not know `logits_to_keep`
            logits = logits[keep]
        values = logits[:, : self.limits.vocab_size].double().numpy()
        return dict(zip(sampled, values, strict=True))

    def _continues_from_cache(self) -> bool:
        """Return whether chunks that continue from the cache give the logits of the full sequence.

        Some models only continue with one token at a time; the full sequence is then computed in each step.
        """
        if self.limits.max_context < sum(_PROBE):
            return False
        self.keeps_cache = True
        ids = np.random.default_rng(0).integers(0, self.limits.vocab_size, sum(_PROBE)).tolist()
        with torch.inference_mode():
            full = self._forward(_Sequence([], None, 0), ids, [len(ids) - 1])[len(ids) - 1]
            chunks, at = _Sequence([], None, 0), 0
            try:
                for n in _PROBE:
                    last = self._forward(chunks, ids[at : at + n], [n - 1])[n - 1]
                    at += n
            except _MODEL_ERRORS:
                return False
        return bool(np.abs(last - full).max() <= _PROBE_TOLERANCE * np.abs(full).max())
