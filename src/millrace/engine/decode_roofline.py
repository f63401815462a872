"""The roofline bound of a decode step: what it must read and compute, and the least time that takes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import CallEntry, read_program_table
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.machine.roofline import Bound, Roofline

# A matmul with 16-bit activations runs in bfloat16 arithmetic, whatever format its weights are stored in.
_ARITHMETIC = {"w8a16": "bf16", "w4a16": "bf16", "fp8a16": "bf16"}


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Matrices of experts, `count` in a layer, of which a row uses `chosen`; nbytes: of all of them, in all layers."""

    count: int
    chosen: int
    nbytes: int

    def bytes_read(self, n_rows: int) -> float:
        """Return the expected bytes that a step of n_rows rows reads, if each row's experts are drawn evenly."""
        return float(self.nbytes * (1 - (1 - self.chosen / self.count) ** n_rows))


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The work of a decode step: it reads all matmul weights once and every sequence's keys and values, and multiplies.

    Norms, activations, attention's arithmetic and sampling are not counted, so no engine reaches the bound.
    weights_bytes: of all matmuls; experts: those of them that only some rows use
    """

    weights_bytes: int
    kv_bytes_per_token: int
    operations: Mapping[str, int]  # by arithmetic, for one sequence
    experts: tuple[ExpertWork, ...] = ()

    @classmethod
    def from_engine(cls, engine: Engine) -> "DecodeWork":
        """Count the work of an engine's program. raises EngineError if its program table is invalid"""
        return cls.counted(read_program_table(engine.folder).calls, engine.page_bytes // PAGE_TOKENS)

    @classmethod
    def counted(cls, calls: Iterable[CallEntry], kv_bytes_per_token: int) -> "DecodeWork":
        """Count the work of a program that was read already."""
        weights_bytes, operations, experts, chosen = 0, Counter[str](), Counter[tuple[int, int]](), 1
        for call in calls:
            if call.kernel == "route":
                chosen = max(int(call.params.get("chosen", 1)), 1)
            if call.kernel == "matmul":
                n, k, count = (int(call.params.get(name, 0)) for name in ("n", "k", "experts"))
                weights_bytes += call.matrix_bytes
                operations[_ARITHMETIC.get(call.note, call.note)] += 2 * n * k * (min(chosen, count) if count else 1)
                if count:
                    experts[count, min(chosen, count)] += call.matrix_bytes
        of_experts = tuple(ExpertWork(count, per_row, nbytes) for (count, per_row), nbytes in experts.items())
        return cls(weights_bytes, kv_bytes_per_token, operations, of_experts)

    def bound(self, roofline: Roofline, n_sequences: int, n_tokens: int) -> Bound:
        """Return the least time of one step. n_tokens: tokens in the KV cache, of all sequences together"""
        unread = sum(int(e.nbytes - e.bytes_read(n_sequences)) for e in self.experts)
        nbytes = self.weights_bytes - unread + n_tokens * self.kv_bytes_per_token
        return roofline.bound(nbytes, {name: n_sequences * n for name, n in self.operations.items()})
