"""Tables about an engine, read from its folder."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import to_builtins

from millrace.cli.console import size
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import (
    CallEntry,
    GraphTable,
    ProgramTable,
    read_graph_table,
    read_program_table,
)
from millrace.engine.artifact.manifest import Manifest
from millrace.engine.artifact.tactics import TacticTable, read_tables, table_for
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.cuda.engine import GpuEngine
from millrace.engine.transformers.engine import TransformersEngine
from millrace.errors import sanitize
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import with_groups
from millrace.machine.cpu import fingerprint, usable_cores


@dataclass(frozen=True)
class Tables:
    """Everything that `millrace build` and `millrace inspect` show of an engine."""

    engine: Engine

    @cached_property
    def program(self) -> ProgramTable:
        return read_program_table(self.engine.folder)

    @cached_property
    def graph(self) -> GraphTable:
        return read_graph_table(self.engine.folder)

    @cached_property
    def all_tactics(self) -> list[TacticTable]:
        return read_tables(self.engine.folder)

    @property
    def tactics(self) -> TacticTable | None:
        """Return the tactics that were timed last."""
        return next(iter(self.all_tactics), None)

    @property
    def calls(self) -> list[CallEntry]:
        return self.program.calls

    @property
    def fusions(self) -> list[tuple[CallEntry, str]]:
        """Return the calls that perform several operations, each with what is fused."""
        return [(call, what) for call in self.calls if (what := self.fused(call))]

    def fused(self, call: CallEntry) -> str:
        """Describe the operations fused into a call; "" if none."""
        params, operands, formula = call.params, call.operands, call.expression
        parts = []
        if params.get("gated"):
            parts.append(f"gate and up merged, {formula or 'activation and product'} in the epilogue")
        elif call.kernel == "matmul" and len(call.origin) > 1:
            parts.append(f"{len(call.origin)} products merged")
        if "bias" in operands:
            parts.append("bias")
        if call.kernel == "matmul" and formula and not params.get("gated"):
            parts.append(f"{formula} in the epilogue")
        if "residual" in operands:
            parts.append("residual added")
        if call.kernel == "rms_norm" and params.get("format"):
            parts.append(f"norm writes {call.note} for the next product")
        if _writes_kv(call):
            persists = params.get("cache") in self._kept_caches
            parts += ["q and k rotated"] if "table" in operands else []
            parts.append("KV pages written" if persists else "keys and values written for this step")
        return ", ".join(parts)

    @cached_property
    def _kept_caches(self) -> list[int]:
        """Return the indices of caches that persist between steps."""
        return [i for i, cache in enumerate(self.engine.manifest.cpu.caches) if cache.place is None]

    @property
    def of_texts(self) -> bool:
        """Whether the engine takes token sequences (language model or encoder)."""
        return self.engine.manifest.is_language_model or self.engine.manifest.is_encoder

    @property
    def limits(self) -> str:
        m = self.engine.manifest
        if self.of_texts:
            return f"{m.max_context:,} tokens a sequence, {m.max_sequences} sequences, {m.max_step_tokens} a step"
        bounds = [f"{sanitize(s.name)} from {s.low:,} to {s.high:,}, usually {s.usual:,}" for s in m.symbols]
        return "; ".join(bounds) or "all shapes are fixed"

    def kernels(self) -> Counter[str]:
        return Counter(call.kernel for call in self.calls)

    def bytes_by_format(self) -> dict[str, int]:
        """Return bytes of weights by format, largest first."""
        sizes: Counter[str] = Counter()
        for weight in self.program.weights:
            sizes[weight.format] += weight.bytes
        return dict(sizes.most_common())

    def memory(self) -> dict[str, int]:
        """Return bytes by purpose; for token sequences also the KV cache of one sequence and of the batch at full
        context."""
        m = self.engine.manifest
        kv, states = self.engine.sequence_bytes(), self.engine.states_bytes
        kv_memory = {
            "kv_bytes_per_token": self.engine.page_bytes // PAGE_TOKENS,
            "kv_bytes_per_sequence": kv,
            "kv_bytes_batch": kv * m.max_sequences,
        }
        return {
            "weights_bytes": m.cpu.weights_bytes,
            "activation_bytes": m.cpu.activation_bytes,
            "activation_lower_bound": m.cpu.activation_lower_bound,
            **(kv_memory if self.of_texts else {}),
            **({"states_bytes": states} if states else {}),
            "peak_bytes": m.cpu.weights_bytes + m.cpu.activation_bytes + states + kv * m.max_sequences,
        }

    def tuning(self) -> dict[str, Any]:
        """Return what the tactics were tuned for, and how many settings changed."""
        table = self.tactics
        if table is None:
            return {"machine": None, "threads": None, "regions": 0, "timed": 0, "changed": 0, "note": "never tuned"}
        choices = table.compared()
        return {
            "machine": table.machine, "threads": table.threads, "regions": len(table.regions),
            "timed": sum(len(c.tried) for choice in choices for c in choice.compared),
            "changed": sum(1 for choice in choices if choice.knobs), "note": table.note,
        }  # fmt: skip

    def precision(self) -> str:
        """Format the precision: "w4a8 g128, lm_head w8a8"."""
        precision_parts = [re.match(r"w[48](g\d+)", name) for name in self.bytes_by_format()]
        groups = sorted({match[1] for match in precision_parts if match}, key=lambda group: int(group[1:]))
        return _precision(self.engine.manifest, " and ".join(groups))

    def summary(self) -> dict[str, Any]:
        """Convert to JSON data."""
        m = self.engine.manifest
        limits = ("max_context", "max_sequences", "max_step_tokens") if self.of_texts else ()
        return {
            "engine": str(self.engine.folder),
            "model": m.model_name,
            "architecture": m.architecture,
            "parameters": m.n_parameters,
            "precision": m.precision,
            "group": m.group,
            "precision_on_gpu": m.gpu.precision or None,
            "bf16_sums": m.cpu.bf16_sums,
            **{name: getattr(m, name) for name in limits},
            "symbols": {s.name: {"low": s.low, "usual": s.usual, "high": s.high} for s in m.symbols},
            "operations": len(self.graph.nodes),
            "calls": len(self.calls),
            "fusions": len(self.fusions),
            "kernels": dict(self.kernels()),
            "weights_by_format": self.bytes_by_format(),
            "memory": self.memory(),
            "tactics": self.tuning(),
            "evaluation": to_builtins(m.evaluation)
            if m.evaluation.tried
            else {"not_measured": m.evaluation.not_measured},
            "notes": m.notes,
            "millrace": m.millrace,
            "format": m.format,
        }


def candidate_losses(tables: Tables) -> list[tuple[str, str, str, str, str]]:
    """Return (precision, KL, perplexity ratio to fp32, agreement of the most likely token, bytes) of all candidates."""

    def format_number(x: float | None, form: str) -> str:
        return "-" if x is None else format(x, form)

    return [
        (
            p.name,
            format_number(p.kl, ".3g"),
            f"x {format_number(p.perplexity_ratio, '.3f')}",
            f"{p.agreement:.1%}",
            size(p.weights_bytes),
        )
        for p in tables.engine.manifest.evaluation.tried
    ]


def tuning_text(tables: Tables) -> str:
    """Describe the machine that the kernels were tuned for, and the result."""
    tuning, table = tables.tuning(), tables.tactics
    if table is None or not table.compared():
        return tuning["note"] or "nothing was tuned"
    here = fingerprint(usable_isas()[0])
    elsewhere = "" if table.machine == here else f"; here is {machine(here)}: millrace tune {tables.engine.folder}"
    threads = f"{table.threads} thread" + ("" if table.threads == 1 else "s")
    other_threads = sorted(t.threads for t in tables.all_tactics[1:] if t.machine == table.machine and t.compared())
    also = f", also for {' and '.join(map(str, other_threads))}" if other_threads else ""
    if not elsewhere and table_for(tables.all_tactics, here, usable_cores()) is None:
        elsewhere = " (a run with another number of threads goes by the rules)"
    return (
        f"for {threads} on {machine(table.machine)}{also}{elsewhere}; {tuning['timed']} settings timed, "
        f"{tuning['changed']} of {len(table.compared())} choices are not the rule"
        + (f"; {table.note}" if table.note else "")
    )


def precision_text(engine: Engine) -> str:
    """Format the precision; engines that are not built have no tables, so groups stored in a checkpoint are missing."""
    if not isinstance(engine, GpuEngine | TransformersEngine):
        return Tables(engine).precision()
    m = engine.manifest
    return _precision(m, f"g{m.group}" if any(value[:2] in ("w4", "w8") for value in m.precision.values()) else "")


def _precision(m: Manifest, groups: str) -> str:
    patterns = [(p, value) for p, value in m.precision.items() if p != "default"]
    if len(patterns) > 4:  # a GGUF may name dozens of layers
        patterns = [(f"{n} layers", value) for value, n in Counter(value for _, value in patterns).items()]
    precision_parts = [m.precision.get("default", "?"), *(f"{pattern} {value}" for pattern, value in patterns)]
    sums = ["bf16 summed by tiles"] if m.cpu.bf16_sums == "tiles" else []
    alone = f"on a GPU {m.gpu.precision}" if m.gpu.precision else "on a GPU rows of E4M3" if m.gpu.fp8_rows else ""
    return ", ".join([*with_groups(precision_parts, groups), *sums, *([alone] if alone else [])])


def machine(fingerprint: Mapping[str, str | int]) -> str:
    return ", ".join(str(fingerprint.get(key, "?")) for key in ("cpu", "isa")) + f", {fingerprint.get('cores')} cores"


def fusions_by_place(tables: Tables) -> list[tuple[str, str, str, str]]:
    """Return (count, kernel, fused operations, origin) of fused calls, aggregated over layers."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for call, what in tables.fusions:
        origin = " + ".join(_short(o, i) for i, o in enumerate(call.origin))
        counted[kernel_of(call), what, origin] += 1
    return [(str(n), kernel, what, origin) for (kernel, what, origin), n in counted.items()]


def _short(origin: str, i: int) -> str:
    """Return `layers.*.mlp.gate_proj` for the first origin, `up_proj` for further ones."""
    parts = ["*" if part.isdigit() else part for part in origin.removeprefix("model.").split(".")]
    return ".".join(parts) if i == 0 else parts[-1]


def _writes_kv(call: CallEntry) -> bool:
    return call.kernel == "rope" and call.params.get("layer", -1) >= 0


def kernel_of(call: CallEntry) -> str:
    """Return the displayed name of a kernel: `rope` without rotation is called kv_write."""
    return "kv_write" if _writes_kv(call) and "table" not in call.operands else call.kernel


def note_of(call: CallEntry) -> str:
    """Return the numerics class, row format or elementwise expression of a call; "" if its kernel says it all."""
    return call.expression if call.kernel == "elementwise" else "" if _writes_kv(call) else call.note
