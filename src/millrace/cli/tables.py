"""An engine folder's own tables (program.json, graph.json), read for people."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from msgspec import DecodeError, Struct, json

from millrace.engine.engine import Engine
from millrace.engine.manifest import GRAPH, PROGRAM_TABLE, damaged
from millrace.engine.native import PAGE_TOKENS

T = TypeVar("T")


class Step(Struct, frozen=True):
    kernel: str
    note: str
    origin: list[str]
    operands: dict[str, dict[str, str | int]]  # {"weight": name, "bytes": n} or {"buffer": number, "offset": n}
    params: dict[str, int | float]


class Weight(Struct, frozen=True):
    name: str
    origin: list[str]
    shape: list[int]
    format: str
    bytes: int
    offset: int


class Buffer(Struct, frozen=True):
    name: str
    bytes: int
    offset: int


class ProgramTable(Struct, frozen=True):
    """program.json, as `compile/report.py` writes it."""

    passes: list[str]
    steps: list[Step]
    weights: list[Weight]
    buffers: list[Buffer]


class Node(Struct, frozen=True):
    op: str
    inputs: list[int | str]  # numbers of values, names of constants
    output: int
    shape: list[str]
    origin: list[str]


class GraphTable(Struct, frozen=True):
    """graph.json, likewise."""

    nodes: list[Node]


@dataclass(frozen=True)
class Tables:
    """What `millrace build` and `millrace inspect` show of an engine."""

    engine: Engine

    @cached_property
    def program(self) -> ProgramTable:
        """raises EngineError where it is not what `millrace build` writes"""
        return self._read(PROGRAM_TABLE, ProgramTable)

    @cached_property
    def graph(self) -> GraphTable:
        """raises EngineError where it is not what `millrace build` writes"""
        return self._read(GRAPH, GraphTable)

    def _read(self, name: str, kind: type[T]) -> T:
        try:
            return json.decode((self.engine.folder / name).read_bytes(), type=kind)
        except DecodeError as error:
            raise damaged(self.engine.folder, f"{name} is not readable: {error}") from error

    @property
    def steps(self) -> list[Step]:
        return self.program.steps

    @property
    def fusions(self) -> list[tuple[Step, str]]:
        """Steps that do the work of several, each with what is fused in it."""
        return [(step, what) for step in self.steps if (what := _fused(step))]

    def kernels(self) -> Counter[str]:
        return Counter(step.kernel for step in self.steps)

    def bytes_by_format(self) -> dict[str, int]:
        """Largest first."""
        sizes: Counter[str] = Counter()
        for weight in self.program.weights:
            sizes[weight.format] += weight.bytes
        return dict(sizes.most_common())

    def memory(self) -> dict[str, int]:
        """Bytes by purpose; KV for one sequence of full context, and for the whole batch of them."""
        m = self.engine.manifest
        kv = self.engine.pages_per_sequence * self.engine.kv.page_bytes()
        return {
            "weights_bytes": m.weights_bytes,
            "activation_bytes": m.activation_bytes,
            "activation_lower_bound": m.activation_lower_bound,
            "kv_bytes_per_token": self.engine.kv.page_bytes() // PAGE_TOKENS,
            "kv_bytes_per_sequence": kv,
            "kv_bytes_batch": kv * m.max_sequences,
            "peak_bytes": m.weights_bytes + m.activation_bytes + kv * m.max_sequences,
        }

    def precision(self) -> str:
        """ "w4a8, lm_head w8a8, groups of 128"."""
        m = self.engine.manifest
        patterns = [(p, value) for p, value in m.precision.items() if p != "default"]
        if len(patterns) > 4:  # a GGUF may name dozens of layers
            patterns = [(f"{n} layers", value) for value, n in Counter(value for _, value in patterns).items()]
        parts = [m.precision.get("default", "?"), *(f"{pattern} {value}" for pattern, value in patterns)]
        grouped = any(p.startswith(("w4", "w8")) for p in m.precision.values())
        return ", ".join(parts) + (f", groups of {m.group}" if grouped else "")

    def summary(self) -> dict[str, Any]:
        """JSON-able."""
        m = self.engine.manifest
        return {
            "engine": str(self.engine.folder),
            "model": m.model_name,
            "architecture": m.architecture,
            "parameters": m.n_parameters,
            "precision": m.precision,
            "group": m.group,
            "max_context": m.max_context,
            "max_sequences": m.max_sequences,
            "max_step_tokens": m.max_step_tokens,
            "operations": len(self.graph.nodes),
            "steps": len(self.steps),
            "fusions": len(self.fusions),
            "kernels": dict(self.kernels()),
            "weights_by_format": self.bytes_by_format(),
            "memory": self.memory(),
            "tuned_for": m.tuned_for,
            "notes": m.notes,
            "millrace": m.millrace,
            "format": m.format,
        }


def _fused(step: Step) -> str:
    """What this step does beside its kernel's own work; "" where nothing."""
    kernel, params, operands = step.kernel, step.params, step.operands
    found = []
    if params.get("gated"):
        found.append("gate and up merged, activation and product in the epilogue")
    elif kernel == "matmul" and len(step.origin) > 1:
        found.append(f"{len(step.origin)} products merged")
    if "bias" in operands:
        found.append("bias")
    if "residual" in operands:
        found.append("residual added")
    if kernel == "rms_norm" and params.get("format"):
        found.append(f"norm writes {step.note} for the next product")
    if kernel == "rope" and params.get("layer", -1) >= 0:
        found.append("q and k rotated, KV pages written")
    return ", ".join(found)
