"""An engine folder's own tables (program.json, graph.json), read for people."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from millrace.engine.engine import Engine
from millrace.engine.manifest import GRAPH, PROGRAM_TABLE
from millrace.engine.native import PAGE_TOKENS


@dataclass(frozen=True)
class Tables:
    """What `millrace build` and `millrace inspect` show of an engine."""

    engine: Engine

    @cached_property
    def program(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode((self.engine.folder / PROGRAM_TABLE).read_bytes())
        return found

    @cached_property
    def graph(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode((self.engine.folder / GRAPH).read_bytes())
        return found

    @property
    def steps(self) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = self.program["steps"]
        return steps

    @property
    def fusions(self) -> list[tuple[dict[str, Any], str]]:
        """Steps that do the work of several, each with what is fused in it."""
        return [(step, what) for step in self.steps if (what := _fused(step))]

    def kernels(self) -> Counter[str]:
        return Counter(step["kernel"] for step in self.steps)

    def bytes_by_format(self) -> dict[str, int]:
        """Largest first."""
        sizes: Counter[str] = Counter()
        for weight in self.program["weights"]:
            sizes[weight["format"]] += weight["bytes"]
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
        parts = [
            m.precision["default"],
            *(f"{pattern} {p}" for pattern, p in m.precision.items() if pattern != "default"),
        ]
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
            "operations": len(self.graph["nodes"]),
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


def _fused(step: dict[str, Any]) -> str:
    """What this step does beside its kernel's own work; "" where nothing."""
    kernel, params, operands = step["kernel"], step["params"], step["operands"]
    found = []
    if params.get("gated"):
        found.append("gate and up merged, activation and product in the epilogue")
    elif kernel == "matmul" and len(step["origin"]) > 1:
        found.append(f"{len(step['origin'])} products merged")
    if "bias" in operands:
        found.append("bias")
    if "residual" in operands:
        found.append("residual added")
    if kernel == "rms_norm" and params.get("format"):
        found.append(f"norm writes {step['note']} for the next product")
    if kernel == "rope" and params.get("layer", -1) >= 0:
        found.append("q and k rotated, KV pages written")
    return ", ".join(found)
