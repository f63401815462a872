"""The program as a table, in readable form: stored in the engine folder, shown by `millrace inspect`."""

from collections.abc import Mapping
from typing import Any

from millrace.compile.lower_cpu.program import Call, Program
from millrace.graph.expressions import formula
from millrace.kernels.declare import Space
from millrace.kernels.expression import tree_of
from millrace.kernels.operand_places import OperandPlace


def program_table(program: Program, checksums: Mapping[int, str]) -> dict[str, Any]:
    """Return a JSON-able table: calls with their origins, weights with their formats, the memory plan and its lower
    bound.

    checksums: of each weight's bytes, by offset
    """
    return {
        "passes": list(program.passes),
        "calls": [
            {
                "kernel": call.kernel,
                "note": call.note,
                "origin": list(call.origin),
                "operands": {name: _place(p, program) for name, p in call.operands.items() if p},
                "params": {k: v for k, v in call.params.items() if not isinstance(v, list)},
                "expression": _expression(call),
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
                "checksum": checksums[o],
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


def _expression(call: Call) -> str:
    """Return the element-wise expression of a call or its epilogue as text; "" if there is none."""
    code, numbers = call.params.get("code"), call.params.get("imm")
    if not isinstance(code, list) or not isinstance(numbers, list) or not code:
        return ""
    alone = [name for name in "abcd" if call.operands.get(name)]
    names = (
        ["gate", "up"] if call.params.get("gated") else alone if call.kernel in ("elementwise", "broadcast") else ["x"]
    )
    return formula(tree_of([int(word) for word in code], numbers, len(names)), names)


def _place(place: OperandPlace, program: Program) -> dict[str, Any]:
    if place.space == Space.WEIGHTS:
        weight = program.weights[place.number]
        return {"weight": weight.name, "bytes": weight.nbytes, "number": place.number}
    return {"buffer": place.number, "offset": place.offset}
