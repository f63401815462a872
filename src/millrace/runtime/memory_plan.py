"""The memory plan, made before weights are read, so that a start that succeeds cannot run out of memory later."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import split_budget
from millrace.errors import MachineError, mib
from millrace.machine.cpu import Memory

# For the interpreter, the tokenizer, scratch buffers and other processes.
RESERVE = 256 << 20
# The share of the memory left by the weights that KV pages take by default.
KV_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class RunPlan:
    """window_pages: pages per window, as Engine.windows; n_slots: state slots (0: the model has no states)"""

    n_pages: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    window_pages: tuple[int, ...] = ()
    n_slots: int = 0
    states_bytes: int = 0

    def full_sequences(self, engine: Engine) -> int:
        """Return how many full-context sequences fit at the same time."""
        pages = (self.n_pages, *self.window_pages)
        needs = (engine.sequence_pages(w) for w in (0, *engine.windows))
        return min(n // max(1, need) for n, need in zip(pages, needs, strict=True))

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes + self.kv_bytes + self.states_bytes


def plan_run(engine: Engine, memory: Memory, kv_memory: int | None = None) -> RunPlan:
    """Plan the KV pages: `kv_memory` bytes, or by default the whole batch at full context, or what memory allows.

    raises MachineError if not even one full-context sequence fits, naming contexts and sizes that would
    """
    engine.check_language_model()
    m = engine.manifest
    fixed = m.cpu.weights_bytes + m.cpu.activation_bytes + engine.states_bytes
    free = memory.available_bytes - fixed - RESERVE
    pages = _divided(engine, int(max(free, 0) * KV_SHARE) if kv_memory is None else kv_memory, kv_memory is not None)
    kv_bytes = _kv_bytes(engine, pages)
    if pages[0] < engine.pages_per_sequence or kv_bytes > free:
        raise _too_little(engine, memory, kv_memory, free)
    return RunPlan(
        pages[0], m.cpu.weights_bytes, m.cpu.activation_bytes, kv_bytes, pages[1:], engine.n_slots, engine.states_bytes
    )


def capped(engine: Engine, plan: RunPlan, sequences: int) -> RunPlan:
    """Limit the pages to those of this many full-context sequences."""
    most = [sequences * engine.sequence_pages(w) for w in (0, *engine.windows)]
    pages = tuple(map(min, (plan.n_pages, *plan.window_pages), most))
    return replace(plan, n_pages=pages[0], window_pages=pages[1:], kv_bytes=_kv_bytes(engine, pages))


def with_one_table(engine: Engine, plan: RunPlan, sequences: int | None) -> RunPlan:
    """Give all cache groups the same number of pages, so that one page table serves all of a sequence's layers.

    It is the number that fits the memory of `plan`, and at most what `sequences` full-context sequences need.
    """
    if not engine.windows:
        return plan if sequences is None else capped(engine, plan, sequences)
    most = plan.n_pages if sequences is None else sequences * engine.pages_per_sequence
    n = min(most, max(1, plan.kv_bytes // engine.page_bytes))
    pages = (n,) * (1 + len(engine.windows))
    return replace(plan, n_pages=n, window_pages=pages[1:], kv_bytes=_kv_bytes(engine, pages))


def _divided(engine: Engine, budget: int, is_explicit: bool) -> tuple[int, ...]:
    """Divide a budget in bytes into pages per cache group, as `engine.kv.split_budget`."""
    all_windows = (0, *engine.windows)
    page, one = (
        {w: engine.window_page_bytes(w) for w in all_windows},
        {w: engine.sequence_pages(w) for w in all_windows},
    )
    return split_budget(budget, page, one, engine.manifest.max_sequences - 1, use_all=is_explicit)


def _kv_bytes(engine: Engine, pages: Sequence[int]) -> int:
    return sum(n * engine.window_page_bytes(w) for n, w in zip(pages, (0, *engine.windows), strict=True))


def plan_encoder(engine: Engine, memory: Memory) -> None:
    """Check that an encoder's weights and buffers fit. raises MachineError"""
    cpu, free = engine.manifest.cpu, memory.available_bytes
    if cpu.weights_bytes + cpu.activation_bytes + RESERVE > free:
        raise MachineError(
            f"this engine needs {mib(cpu.weights_bytes + cpu.activation_bytes + RESERVE)}: weights "
            f"{mib(cpu.weights_bytes)}, activations {mib(cpu.activation_bytes)}; {mib(free)} are available",
            "all of it before anything is loaded", "build with --precision bf16, or free memory",
        )  # fmt: skip


def _too_little(engine: Engine, memory: Memory, kv_memory: int | None, free: int) -> MachineError:
    m, least, states_bytes = engine.manifest, engine.sequence_bytes(), engine.states_bytes
    if kv_memory is not None and kv_memory < least:
        fits = engine.longest_sequence(kv_memory)
        return MachineError(
            f"--kv-memory {mib(kv_memory)} holds {fits} tokens",
            f"{mib(least)} for one sequence of the engine's {m.max_context} tokens",
            f"raise it, or build with --max-context {fits}" if fits else "raise it",
        )
    needed = m.cpu.weights_bytes + m.cpu.activation_bytes + states_bytes + RESERVE + (kv_memory or least)
    fits = engine.longest_sequence(int(max(free, 0) * (KV_SHARE if kv_memory is None else 1.0)))
    states = f"states {mib(states_bytes)}, " if states_bytes else ""
    smaller = f"build with --max-context {fits}" if fits else "build with a smaller --precision, or free memory"
    return MachineError(
        f"this engine needs {mib(needed)}: weights {mib(m.cpu.weights_bytes)}, "
        f"activations {mib(m.cpu.activation_bytes)}, {states}KV pages {mib(kv_memory or least)}; "
        f"{mib(memory.available_bytes)} are available",
        "all of it before anything is loaded",
        smaller if kv_memory is None else f"lower --kv-memory to {mib(max(free, 0))}, or {smaller}",
    )
