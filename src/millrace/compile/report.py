"""The program as a plain table: what the engine folder keeps for people, and what `millrace inspect` shows."""

from typing import Any

from millrace.compile.program import Program
from millrace.kernels.declare import Space
from millrace.kernels.places import Place


def program_table(program: Program) -> dict[str, Any]:
    """JSON-able: calls with their origins, weights with their formats, the memory plan with its lower bound."""
    return {
        "passes": list(program.passes),
        "calls": [
            {
                "kernel": call.kernel,
                "note": call.note,
                "origin": list(call.origin),
                "operands": {name: _place(p, program) for name, p in call.operands.items() if p},
                "params": {k: v for k, v in call.params.items() if not isinstance(v, list)},
            }
            for call in program.calls
        ],
        "weights": [
            {
                "name": w.name,
                "origin": list(w.origin),
                "shape": list(w.shape),
                "format": w.format,
                "bytes": w.nbytes,
                "offset": o,
            }
            for w, o in zip(program.weights, program.weights_offsets, strict=True)
        ],
        "buffers": [
            {"name": b.name, "bytes": b.nbytes, "offset": offset, "first": b.first, "last": b.last}
            for b, offset in zip(program.memory.buffers, program.memory.offsets, strict=True)
        ],
        "activation_bytes": program.memory.total_bytes,
        "activation_lower_bound": program.memory.lower_bound,
    }


def _place(place: Place, program: Program) -> dict[str, Any]:
    if place.space == Space.WEIGHTS:
        return {"weight": program.weights[place.number].name, "bytes": program.weights[place.number].nbytes}
    return {"buffer": place.number, "offset": place.offset}
