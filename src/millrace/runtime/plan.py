"""What will lie in memory, decided before a weight is read: so a start that succeeds cannot fail later."""

from dataclasses import dataclass

from millrace.engine.engine import Engine
from millrace.engine.kv import PAGE_TOKENS
from millrace.errors import MachineError, mib
from millrace.machine.cpu import Memory

# Interpreter, tokenizer, scratch and what the rest of the system may take while we run.
RESERVE = 256 << 20
# KV pages take at most this share of what is free beside the weights, unless more was asked for.
KV_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class RunPlan:
    n_pages: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes + self.kv_bytes


def plan_run(engine: Engine, memory: Memory, kv_memory: int | None = None) -> RunPlan:
    """KV pages for `kv_memory` bytes; unasked, for the whole batch at full context, or for what is free.

    raises MachineError where one sequence of full context would not fit, naming contexts and sizes that would
    """
    engine.check_language_model()
    m, page = engine.manifest, max(engine.page_bytes, 1)  # a model without attention keeps nothing
    fixed = m.cpu.weights_bytes + m.cpu.activation_bytes
    free = memory.available_bytes - fixed - RESERVE
    least, most = engine.pages_per_sequence, engine.pages_per_sequence * m.max_sequences
    n_pages = min(int(max(free, 0) * KV_SHARE) // page, most) if kv_memory is None else kv_memory // page
    if n_pages < least or n_pages * page > free:
        raise _too_little(engine, memory, kv_memory, free)
    return RunPlan(n_pages, m.cpu.weights_bytes, m.cpu.activation_bytes, n_pages * page)


def plan_encoder(engine: Engine, memory: Memory) -> None:
    """raises MachineError where it does not fit"""
    cpu, free = engine.manifest.cpu, memory.available_bytes
    if cpu.weights_bytes + cpu.activation_bytes + RESERVE > free:
        raise MachineError(
            f"this engine needs {mib(cpu.weights_bytes + cpu.activation_bytes + RESERVE)}: weights "
            f"{mib(cpu.weights_bytes)}, activations {mib(cpu.activation_bytes)}; {mib(free)} are available",
            "all of it before anything is loaded", "build with --precision bf16, or free memory",
        )  # fmt: skip


def _too_little(engine: Engine, memory: Memory, kv_memory: int | None, free: int) -> MachineError:
    m, page = engine.manifest, max(engine.page_bytes, 1)  # a model without attention keeps nothing
    least = engine.pages_per_sequence * page
    if kv_memory is not None and kv_memory < least:
        fits = kv_memory // page * PAGE_TOKENS
        return MachineError(
            f"--kv-memory {mib(kv_memory)} holds {fits} tokens",
            f"{mib(least)} for one sequence of the engine's {m.max_context} tokens",
            f"raise it, or build with --max-context {fits}" if fits else "raise it",
        )
    needed = m.cpu.weights_bytes + m.cpu.activation_bytes + RESERVE + (kv_memory or least)
    fits = max(int(free * (KV_SHARE if kv_memory is None else 1.0)) // page, 0) * PAGE_TOKENS
    smaller = f"build with --max-context {fits}" if fits else "build with a smaller --precision, or free memory"
    return MachineError(
        f"this engine needs {mib(needed)}: weights {mib(m.cpu.weights_bytes)}, "
        f"activations {mib(m.cpu.activation_bytes)}, KV pages {mib(kv_memory or least)}; "
        f"{mib(memory.available_bytes)} are available",
        "all of it before anything is loaded",
        smaller if kv_memory is None else f"lower --kv-memory to {mib(max(free, 0))}, or {smaller}",
    )
