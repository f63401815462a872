"""Adapters, identified by their numbers in the executor: each sequence of a step may use another one.

An adapter changes keys and values, so its number is part of the keys of all pages of its requests.
"""

from collections.abc import Sequence as Ordered

import numpy as np

from millrace.engine.executor import ExecutorLimits, IntArray
from millrace.errors import RequestError
from millrace.runtime.request.request import Sequence


def check_adapter(number: int, limits: ExecutorLimits) -> None:
    """Check an adapter's number. raises RequestError if the executor does not have it"""
    n = limits.n_adapters
    if not 0 <= number <= n:
        expected = f"0 (none) to {n}" if n else "0: this engine has no adapters"
        raise RequestError(f"adapter {number}", expected, "choose an adapter of this engine", "adapter")


def step_adapters(sequences: Ordered[Sequence]) -> IntArray | None:
    """Return the adapter of each sequence of a step (S,); None if none has one."""
    numbers = [seq.request.options.adapter for seq in sequences]
    return np.array(numbers, np.int32) if any(numbers) else None
