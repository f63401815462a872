"""In which numbers an engine computes, said the same way in every row of every table: weights, activations, head."""

import json

from millrace.engine.engine import Engine
from millrace.engine.manifest import PROGRAM_TABLE, Manifest
from millrace.kernels.precision import Precision

_FLOATS = {Precision.FP32: "fp32", Precision.BF16: "bf16"}


def named(engine: Engine) -> dict[str, str]:
    """Of one of ours, by its manifest and its program."""
    m = engine.manifest
    default = Precision(m.precision["default"])
    others = {Precision(p) for name, p in m.precision.items() if name not in ("default", "lm_head")} - {default}
    mixed = f", some layers {' and '.join(sorted(others))}" if others else ""
    return {
        "weights": _weights(default, m) + mixed, "activations": _activations(default, m), "head": _head(engine),
        "kv": m.kv_format,
    }  # fmt: skip


def _weights(precision: Precision, m: Manifest) -> str:
    return _FLOATS.get(precision) or f"int{precision.bits}, groups of {m.group}"


def _activations(precision: Precision, m: Manifest) -> str:
    if precision in _FLOATS:
        return _FLOATS[precision]
    return f"int8, groups of {m.group}" if precision.value.endswith("a8") else "bf16"


def _head(engine: Engine) -> str:
    """As the program computes the logits: its last product, and the likeliest rows again where it does that."""
    steps = json.loads((engine.folder / PROGRAM_TABLE).read_text())["calls"]
    head = [s["note"] for s in steps if s["kernel"] == "matmul"][-1]
    again = next((s["params"]["count"] for s in steps if s["kernel"] == "rescore"), None)
    return head if again is None else f"{head}, its best {again} again in w8a8"
