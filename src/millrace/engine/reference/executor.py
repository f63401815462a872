"""The reference executor of a language model: steps over an interpreted graph, sampling in float64."""

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat
from millrace.engine.executor import Executor, ExecutorLimits, IntArray, StepInputs, StepOutputs
from millrace.engine.reference.interpreter import Interpreter, PageTables, WindowTables
from millrace.engine.reference.sampling import sample_step
from millrace.graph.types import Graph
from millrace.kernels.operators import Rows


class ReferenceExecutor(Executor):
    """kv: the KV format. bf16_table, fp8_rows: as in the interpreter"""

    def __init__(
        self, graph: Graph, limits: ExecutorLimits, *, kv: KvFormat, bf16_table: bool, fp8_rows: Collection[str] = ()
    ) -> None:
        assert limits.page_tokens == PAGE_TOKENS, limits
        self.limits = limits
        self._step: StepInputs
        self.interpreter = Interpreter(graph, kv=kv, bf16_table=bf16_table, n_pages=limits.n_pages, fp8_rows=fp8_rows)

    def launch(self, step: StepInputs) -> None:
        self._step = step

    def wait(self) -> StepOutputs:
        return sample_step(self._step, self.logits(self._step))

    def logits(self, step: StepInputs) -> Rows:
        """Return the logits (R, V) of the sampled rows, and store keys and values."""
        for source, target in () if step.copies is None else step.copies:
            self.interpreter.copy_page(int(source), int(target))
        windows = dict[int, WindowTables]()
        for limits, w in zip(self.limits.windows, step.windows_of(self.limits), strict=True):
            for source, target in () if w.copies is None else w.copies:
                self.interpreter.copy_page(int(source), int(target), limits.tokens)
            tables = _split(w.pages, w.page_starts)
            windows[limits.tokens] = WindowTables(limits.n_pages, tables, [int(n) for n in w.first])
        rotary = step.positions if step.rotary_positions is None else step.rotary_positions
        inputs = {
            "tokens": step.tokens, "positions": rotary, "lengths": np.diff(step.starts),
            "rows": step.sampling["token"], "adapters": step.adapters_of_tokens(),
        }  # fmt: skip
        states = step.states_of(self.limits)
        own = [] if states is None else list(zip(states.read.tolist(), states.write.tolist(), strict=True))
        pages = _split(step.pages, step.page_starts)
        return self.interpreter.run(inputs, pages, windows, own, step.embeddings, step.positions)["logits"]

    def close(self) -> None:
        self.interpreter.forget()


def _split(pages: IntArray, starts: IntArray) -> PageTables:
    """Return the pages of each sequence."""
    return [pages[a:b] for a, b in pairwise(starts)]
