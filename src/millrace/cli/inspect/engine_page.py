"""`millrace inspect --html`: an engine as one offline HTML page with layers, fusions, memory plan, bytes and bounds."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from millrace.cli.console import size
from millrace.cli.engine_tables import Tables, candidate_losses, fusions_by_place, kernel_of, note_of
from millrace.engine.artifact.engine_tables import BufferEntry, CallEntry
from millrace.engine.decode_roofline import DecodeWork
from millrace.machine.roofline import Roofline
from millrace.report.format_numbers import format_count
from millrace.report.page import render
from millrace.report.plot_scale import Scale, byte_ticks

# What is shown of an engine that somebody else wrote is bounded: so many calls, weights and fusions, and characters.
MAX_ROWS, MANY, FEW, LONGEST = 4096, 64, 6, 120
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1080, 430, 78, 14, 16, 34
KINDS = ("matrix products", "attention", "norms and conversions", "the rest", "inputs")
_KERNELS = (("matmul", "rescore"), ("attention", "rope"), ("rms_norm", "layer_norm", "normalise", "convert"))
_KIND = {kernel: kind for kind, kernels in enumerate(_KERNELS) for kernel in kernels}
_REST, _INPUT = 3, 4


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Adjacent calls of one module."""

    name: str
    calls: list[CallEntry]

    @property
    def kernels(self) -> list[str]:
        return [f"matmul:{call.note}" if call.kernel == "matmul" else kernel_of(call) for call in self.calls]

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of matmul weights, which a step reads completely."""
        return sum(call.matrix_bytes for call in self.calls)


def engine_page(tables: Tables, roofline: Roofline | None) -> str:
    """Render the page. roofline: saved by `millrace doctor` for this machine; None: no times are shown"""
    calls = tables.calls[:MAX_ROWS]
    reads = sum(call.matrix_bytes for call in tables.calls)
    return render(
        Path(__file__).with_name("engine_page.html"), m=tables.engine.manifest, tables=tables, memory=tables.memory(),
        losses=candidate_losses(tables),
        plan=_plan(tables), layers=_layers(tables, reads, roofline), size=size, format_count=format_count, kinds=KINDS,
        turn="step" if tables.of_texts else "run",
        formats=list(tables.bytes_by_format().items())[:FEW], passes=tables.program.passes[:MANY],
        fusions=[tuple(map(_short, row)) for row in fusions_by_place(tables)[:MAX_ROWS]],
        calls=[_call(i, call, tables, reads, roofline) for i, call in enumerate(calls)], n_calls=len(tables.calls),
        weights=[_weight(w.name, w.shape, w.format, w.bytes) for w in tables.program.weights[:MAX_ROWS]],
        bound=None if roofline is None or not reads else _bound(tables, roofline), reads=reads,
    )  # fmt: skip


def layers_of(calls: Sequence[CallEntry]) -> list[LayerRow]:
    """Group calls in program order: `model.layers.3` is one group, and so is each module outside of the layers."""
    layers: list[LayerRow] = []
    for call in calls:
        name = module_of(call.origin, call.kernel)
        if not layers or layers[-1].name != name:
            layers.append(LayerRow(name, []))
        layers[-1].calls.append(call)
    return layers


def module_of(origin: Sequence[str], default: str) -> str:
    """Return `model.layers.3`, or the module itself outside of the layers; `default` if the origin is unknown."""
    parts = next((o for o in origin if o), default).split(".")
    for name in ("layers", "layer"):
        if name in parts:
            return ".".join(parts[: parts.index(name) + 2])
    return ".".join(parts)


def alive(buffers: Sequence[BufferEntry], n_calls: int) -> list[int]:
    """Return the bytes that are live at each call."""
    change = [0] * (n_calls + 1)
    for buffer in buffers:
        change[min(buffer.first, n_calls)] += buffer.bytes
        change[min(buffer.last + 1, n_calls)] -= buffer.bytes
    return list(accumulate(change[:n_calls]))


def _plan(tables: Tables) -> dict[str, Any]:
    """Return the plot of the memory plan: x counts calls, y bytes of the arena."""
    cpu, calls = tables.engine.manifest.cpu, tables.calls[:MAX_ROWS]
    buffers = [b for b in tables.program.buffers if 0 <= b.first <= b.last][: 4 * MAX_ROWS]
    inputs = {(slot.name, slot.offset) for slot in cpu.inputs}
    n_calls, most = max(len(calls), 1), max(cpu.activation_bytes, 1)
    x, y = Scale(0, n_calls, LEFT, WIDTH - RIGHT), Scale(0, most, HEIGHT - BOTTOM, TOP)
    rectangles = [
        {
            "x": x.at(b.first), "width": round(x.at(min(b.last, n_calls - 1) + 1) - x.at(b.first), 2),
            "y": y.at(b.offset + b.bytes), "height": round(y.at(b.offset) - y.at(b.offset + b.bytes), 2),
            "kind": _INPUT if (b.name, b.offset) in inputs else _KIND.get(calls[b.first].kernel, _REST),
            "says": f"{_short(b.name)}: {b.bytes:,} bytes at {b.offset:,}, calls {b.first} to {b.last}",
        }
        for b in buffers if b.first < len(calls)
    ]  # fmt: skip
    needed = alive(buffers, len(calls))
    outline = " ".join(f"{x.at(i)},{y.at(v)} {x.at(i + 1)},{y.at(v)}" for i, v in enumerate(needed))
    step = max(1, n_calls // 10)
    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM,
        "rectangles": rectangles, "outline": outline, "bound_y": y.at(cpu.activation_lower_bound),
        "ticks": [{"y": y.at(v), "label": size(v)} for v in byte_ticks(most)],
        "numbers": [{"x": x.at(i), "label": str(i)} for i in range(0, n_calls + 1, step)],
    }  # fmt: skip


def _bound(tables: Tables, roofline: Roofline) -> dict[str, str]:
    bound = DecodeWork.counted(tables.calls, 0).bound(roofline, 1, 0)
    return {"time": _time(bound.seconds), "rate": f"{1 / bound.seconds:,.0f}", "by": bound.by}


def _layers(tables: Tables, reads: int, roofline: Roofline | None) -> list[dict[str, Any]]:
    """Return the rows of the layers, with the number of traced operations that each performs."""
    operations: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in tables.graph.nodes:
        operations[module_of(node.origin, node.op)][node.op] += 1
    layers = layers_of(tables.calls[:MAX_ROWS])
    largest = max((layer.weights_bytes for layer in layers), default=0)
    return [
        {
            "name": _short(layer.name), "n_calls": len(layer.calls), "kernels": _short(" ".join(layer.kernels)),
            "n_operations": operations[layer.name].total(),
            "operations": _short(", ".join(f"{n} {op}" for op, n in operations[layer.name].most_common())),
            "bytes": _size(layer.weights_bytes), "percent": f"{100 * layer.weights_bytes / max(reads, 1):.1f} %",
            "bar": round(100 * layer.weights_bytes / max(largest, 1), 1),
            "time": _least(layer.weights_bytes, reads, roofline),
        }
        for layer in layers
    ]  # fmt: skip


def _call(number: int, call: CallEntry, tables: Tables, reads: int, roofline: Roofline | None) -> dict[str, Any]:
    p, nbytes = call.params, call.matrix_bytes
    shape = f"{p.get('n')} x {p.get('k')}" if call.kernel == "matmul" else str(p.get("n", ""))
    return {
        "number": number, "kernel": _short(kernel_of(call)), "note": _short(note_of(call)), "shape": shape,
        "origin": _short(" + ".join(o for o in call.origin if o)), "bytes": _size(nbytes),
        "time": _least(nbytes, reads, roofline), "fused": _short(tables.fused(call)),
    }  # fmt: skip


def _weight(name: str, shape: Sequence[int], format: str, nbytes: int) -> dict[str, Any]:
    return {
        "name": _short(name), "shape": " x ".join(map(str, shape[:8])), "format": _short(format),
        "bytes": size(nbytes), "bits": f"{8 * nbytes / max(math.prod(shape), 1):.2f}",
    }  # fmt: skip


def _least(nbytes: int, reads: int, roofline: Roofline | None) -> str:
    """Return the least time to read n bytes in a step that reads `reads` in total, from the memory level that holds
    them."""
    return "" if roofline is None or not nbytes else _time(nbytes / roofline.level_of(reads).all_threads.usual)


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else ""


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
