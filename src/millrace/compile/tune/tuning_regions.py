"""Groups program calls that do identical work, so that each group is tuned once; lists the knob settings to try."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.compile.tune.tuning_cases import USUAL_ROWS, Case, TunedRows, max_context_step
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import CallEntry, read_program_table
from millrace.engine.artifact.manifest import PROGRAM, PROGRAM_TABLE, Manifest, damaged
from millrace.engine.artifact.tactics import Choice
from millrace.errors import sanitize
from millrace.kernels.catalogue import kernels
from millrace.kernels.declare import Scaling, WeightFormat
from millrace.kernels.layout import PANEL, panel_bytes, up
from millrace.kernels.precision import SCALING_WORDS

SAMPLED = ("", "sampled rows", "sampled rows")  # for T, S and R


@dataclass(slots=True)
class TuningTask:
    """A region that is being tuned."""

    name: str
    kernel: str
    params: Mapping[str, int | float]
    calls: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)  # by rows

    @property
    def knobs(self) -> frozenset[str]:
        return _knobs()[self.kernel]

    def takes_part(self, case: Case) -> bool:
        return case.symbols is None or self.params.get("rows", 0) in case.symbols

    def choice(self, rows: int) -> Choice:
        """Return the choice for `rows` rows; by default the kernel's default rule."""
        return self.choices.get(rows, Choice(rows, {}, []))

    def settings(self, knob: str, rows: int, threads: int) -> list[int]:
        """Return the settings to try; the default rule first."""
        return [0, *_SETTINGS[knob](self, rows, threads)]


def _heights(_: TuningTask, rows: int, threads: int) -> Iterator[int]:
    """Yield heights that cut the rows into different numbers of tiles."""
    visited = {1}
    for height in (12, 10, 8, 6, 4):
        tiles = -(-rows // height)
        if tiles not in visited and len(visited) < 5:
            visited.add(tiles)
            yield height


def _task_panels(work: TuningTask, rows: int, threads: int) -> Iterator[int]:
    """Yield sizes that keep every worker busy."""
    panels = up(int(work.params["n"]), PANEL) // PANEL
    size = panel_bytes(*(int(work.params[name]) for name in ("weights", "k", "group", "scaling")))
    return (p for p in (1, 4, 16) if p * threads <= panels and p * size <= 2 << 20)


def _distances(_: TuningTask, rows: int, threads: int) -> Iterator[int]:
    yield from (2048, 4096, 16384)


def _worker_tasks(_: TuningTask, rows: int, threads: int) -> Iterator[int]:
    """Yield numbers of workers; a single one divides nothing."""
    yield from (1, 2, 8) if threads > 1 else ()


def _task_rows(work: TuningTask, rows: int, threads: int) -> Iterator[int]:
    """Yield rows: tokens times the query heads that share their keys."""
    together = rows * int(work.params["heads"]) // int(work.params["kv_heads"])
    return (r for r in (6, 8, 12) if r < together)


def _first_level(_: TuningTask, rows: int, threads: int) -> Iterator[int]:
    yield 1


_SETTINGS: dict[str, Callable[[TuningTask, int, int], Iterator[int]]] = {
    "tile_rows": _heights, "ahead": _distances, "task_panels": _task_panels,
    "worker_tasks": _worker_tasks, "task_rows": _task_rows, "first_level": _first_level,
}  # fmt: skip


def _knobs() -> dict[str, frozenset[str]]:
    """Return the knobs of each kernel that has some."""
    return {k.name: frozenset(knob.name for knob in k.knobs) for k in kernels() if k.knobs}


def regions_of(engine: Engine, rows: TunedRows = USUAL_ROWS) -> dict[str, TuningTask]:
    """Return the regions of an engine. raises EngineError if the program table does not fit its program"""
    return regions(_calls(engine), _symbols(engine.manifest), max_context_step(engine, rows))


def regions(calls: Sequence[CallEntry], symbols: Sequence[str] = SAMPLED, context: int = 0) -> dict[str, TuningTask]:
    """Group calls by name: kernel, numerics class and shape, in any layer; attention also by the timed context."""
    result: dict[str, TuningTask] = {}
    for i, call in enumerate(calls):
        if _is_tunable(call):
            name = _attention(call, context) if call.kernel == "attention" else _product(call, symbols)
            result.setdefault(name, TuningTask(name, call.kernel, call.params)).calls.append(i)
    return result


def _is_tunable(call: CallEntry) -> bool:
    """Return whether a call has knobs to be timed. Not experts' matmuls: each expert has its own rows."""
    return call.kernel in _knobs() and not call.params.get("experts")


def _product(call: CallEntry, symbols: Sequence[str]) -> str:
    p = call.params
    flags = [f"groups of {p['group']}"] if p["group"] else []
    flags += [f"of {p['x_group']} in rows"] if p.get("x_group", p["group"]) != p["group"] else []
    flags += [SCALING_WORDS[int(p["scaling"])]] if p.get("scaling") else []
    flags += [flag for flag in ("bias", "residual") if flag in call.operands]
    flags += ["gated"] if p.get("gated") else []
    flags += [symbols[int(p["rows"])]] if p.get("rows") else []
    return ", ".join([f"{call.kernel} {call.note} {p['n']} x {p['k']}", *flags])


def _attention(call: CallEntry, context: int) -> str:
    p = call.params
    flags = [f"{p['kv_heads']} of keys"] if p["kv_heads"] != p["heads"] else []
    flags += [f"up to {context} tokens"] if context else []
    return ", ".join([f"{call.kernel} {call.note} {p['heads']} heads of {p['head_dim']}", *flags])


def _calls(engine: Engine) -> list[CallEntry]:
    """Return the program's calls, after checking what is read of them."""
    calls = read_program_table(engine.folder).calls
    symbols = range(len(engine.manifest.symbols))
    tunable = [call for call in calls if _is_tunable(call)]
    if len(calls) != engine.manifest.cpu.n_calls or not all(_is_whole(call, symbols) for call in tunable):
        raise damaged(engine.folder, f"{PROGRAM_TABLE} does not fit {PROGRAM}")
    return calls


def _is_whole(call: CallEntry, symbols: range) -> bool:
    names = ("heads", "kv_heads", "head_dim") if call.kernel == "attention" else ("n", "k")
    sizes = [call.params.get(name, 0) for name in names]
    valid = all(isinstance(size, int) and 0 < size < 1 << 24 for size in sizes)
    valid = valid and call.params.get("rows", 0) in symbols
    if call.kernel == "attention":
        return valid
    group, scaling = call.params.get("group", ""), call.params.get("scaling", -1)
    valid = valid and call.params.get("weights") in [int(f) for f in WeightFormat]
    valid = valid and isinstance(group, int) and scaling in [int(s) for s in Scaling]
    return valid and (scaling < Scaling.LEVELS or group in (16, 32))


def _symbols(m: Manifest) -> Sequence[str]:
    """Return the name of the row count of each symbol."""
    return SAMPLED if m.is_language_model or m.is_encoder else [f"{sanitize(s.name)} rows" for s in m.symbols]
