"""In which numbers an engine computes, said alike in all tables: weights, activations, head and the rest."""

from collections import Counter
from collections.abc import Callable

from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import CallEntry, read_program_table
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.precision import HADAMARD, SCALING_WORDS

_WEIGHTS = {WeightFormat.F32: "fp32", WeightFormat.BF16: "bf16", WeightFormat.W8: "int8", WeightFormat.W4: "int4"}
BY_TILES = "attention by tiles"  # of AMX, whose sums are others
_ROWS = {RowFormat.F32: "fp32", RowFormat.BF16: "bf16", RowFormat.Q8: "int8", RowFormat.HADAMARD_Q8: "int8"}


def named(engine: Engine) -> dict[str, str]:
    """Of one of ours, by its program: what most of its weights are, and what others are besides."""
    calls = read_program_table(engine.folder).calls
    *layers, head = [c for c in calls if c.kernel == "matmul"]
    again = next((c.params["count"] for c in calls if c.kernel == "rescore"), None)
    return {
        "weights": _most(layers, _weights), "activations": _most(layers, _rows),
        "head": f"{_both(head)}" + (f", its best {again} again in w8a8" if again else ""),
        "kv": engine.manifest.kv_format,
        "attention": BY_TILES if any(c.kernel == "attention" and c.params["tiles"] for c in calls) else "",
    }  # fmt: skip


def _most(calls: list[CallEntry], told: Callable[[CallEntry], str]) -> str:
    """What the most bytes are, and how the others differ from it."""
    sizes: Counter[str] = Counter()
    for call in calls:
        sizes[told(call)] += call.matrix_bytes
    first, *others = [name for name, _ in sizes.most_common()]
    return ", some layers ".join([first, " and ".join(sorted(others))]) if others else first


def _weights(call: CallEntry) -> str:
    format, by = WeightFormat(int(call.params["weights"])), SCALING_WORDS[int(call.params["scaling"])]
    words = HADAMARD if _transformed(call) else by
    return ", ".join(filter(None, (_WEIGHTS[format], _groups(call, "group"), words)))


def _rows(call: CallEntry) -> str:
    format = RowFormat(int(call.params["format"]))
    grouped = _groups(call, "x_group") if format >= RowFormat.Q8 else ""
    return ", ".join(filter(None, (_ROWS[format], grouped, HADAMARD if _transformed(call) else "")))


def _groups(call: CallEntry, of: str) -> str:
    return f"groups of {call.params[of]}" if call.params[of] else ""


def _transformed(call: CallEntry) -> bool:
    return call.params["format"] == RowFormat.HADAMARD_Q8


def _both(call: CallEntry) -> str:
    """Of a head, as short as it is clear: "w8a8 g128 by Hadamard"."""
    words = HADAMARD if _transformed(call) else SCALING_WORDS[int(call.params["scaling"])]
    group = f"g{call.params['group']}" if call.params["group"] else ""
    return " ".join(filter(None, (call.note, group, words)))
