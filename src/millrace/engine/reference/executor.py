"""The reference executor of a language model: steps over an interpreted graph, sampling in float64."""

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat
from millrace.engine.executor import (
    Executor,
    ExecutorLimits,
    IntArray,
    SampleError,
    StepInputs,
    StepOutputs,
)
from millrace.engine.reference.interpreter import Interpreter, PageTables, WindowTables
from millrace.graph.types import Graph
from millrace.kernels.operators import Rows
from millrace.kernels.sample.ref import draw, penalised, probabilities, uniform, unpacked


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
        step = self._step
        logits = self.logits(step)
        rows = step.sampling
        top = max(int(rows["n_top"].max()), 0) if len(rows) else 0
        out = StepOutputs(
            tokens=np.zeros(len(rows), np.int32), logprobs=np.zeros(len(rows), np.float32),
            ranks=np.zeros(len(rows), np.int32), top_ids=np.zeros((len(rows), top), np.int32),
            top_logprobs=np.zeros((len(rows), top), np.float32),
        )  # fmt: skip
        for r in range(len(rows)):
            self._sample(r, logits[r], step, out)
        return out

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

    def _sample(self, r: int, logits: Rows, step: StepInputs, out: StepOutputs) -> None:
        row = step.sampling[r]
        if not np.isfinite(logits).all():
            out.tokens[r] = SampleError.NOT_FINITE
            return
        if row["mask"]:
            logits = np.where(unpacked(step.filled_masks()[row["mask"] - 1], len(logits)), logits, -np.inf)
        if not np.isfinite(logits).any():
            out.tokens[r] = SampleError.NOTHING_ALLOWED
            return
        logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        adjusted = logits.copy()
        biases = slice(row["bias_start"], row["bias_start"] + row["bias_count"])
        adjusted[step.bias_ids[biases]] += step.bias_values[biases]
        start, prompt, output = (int(row[n]) for n in ("history_start", "history_prompt", "history_output"))
        history = step.history[start : start + prompt + output]
        adjusted = penalised(
            adjusted, history[:prompt], history[prompt:], float(row["repetition_penalty"]),
            float(row["presence_penalty"]), float(row["frequency_penalty"]),
        )  # fmt: skip
        token = int(adjusted.argmax() if row["target"] < 0 else row["target"])
        if row["target"] < 0 and row["temperature"] >= 1e-5:
            p = probabilities(
                adjusted, float(row["temperature"]), int(row["top_k"]), float(row["top_p"]), float(row["min_p"])
            )
            token = draw(p, uniform(int(row["seed"]), int(row["choice"]), int(row["position"])))
        out.tokens[r], out.logprobs[r] = token, logp[token]
        out.ranks[r] = 1 + int((logits > logits[token]).sum())
        best = np.lexsort((np.arange(len(logits)), -logits))[: max(int(row["n_top"]), 0)]
        best = best[np.isfinite(logits[best])]
        out.top_ids[r, : max(int(row["n_top"]), 0)] = -1
        out.top_ids[r, : len(best)], out.top_logprobs[r, : len(best)] = best, logp[best]


def _split(pages: IntArray, starts: IntArray) -> PageTables:
    """Return the pages of each sequence."""
    return [pages[a:b] for a, b in pairwise(starts)]
