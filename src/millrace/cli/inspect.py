"""`millrace inspect`: what an engine is made of."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import click
from msgspec import to_builtins

from millrace.cli.options import json_option
from millrace.cli.screen import count, heading, pairs, print_json, progress, size, table
from millrace.cli.tables import Tables, tuned
from millrace.compile.find import find_built
from millrace.engine.engine import Engine
from millrace.engine.tables import Call
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace inspect ./llama.engine
  millrace inspect tiny --steps"""


@click.command(epilog=EPILOG)
@click.argument("engine")
@click.option("--steps", "part", flag_value="steps", help="Every step of the program, in its order.")
@click.option("--weights", "part", flag_value="weights", help="Every packed weight.")
@click.option("--memory", "part", flag_value="memory", help="The memory plan of a step, buffer by buffer.")
@click.option("--tactics", "part", flag_value="tactics", help="What was timed for each kernel and shape, and chosen.")
@click.option("--graph", "part", flag_value="graph", help="The graph as traced from the model, before any pass.")
@json_option
@click.pass_obj
def command(env: Env, engine: str, part: str | None, as_json: bool) -> None:
    """Show what an engine is made of.

    Model, precision, layers with their kernels, fusions with their origin, bytes, memory plan. ENGINE is an engine
    folder, or the name of an engine in the cache (`millrace list`), or the model it was built from: its name, folder
    or GGUF file.
    """
    with progress(as_json) as report:
        tables = Tables(Engine.open(find_built(engine, env, report)))
    if as_json:
        print_json(_as_json(tables, part))
    else:
        _PARTS[part](tables)


def _summary(tables: Tables) -> None:
    m, memory, program = tables.engine.manifest, tables.memory(), tables.program
    heading(f"{m.model_name}  ({tables.engine.folder})")
    pairs(
        [
            ("model", f"{m.architecture}, {count(m.n_parameters)} parameters, vocabulary {m.vocab_size:,}"),
            ("precision", tables.precision()),
            ("limits", f"{m.max_context:,} tokens a sequence, {m.max_sequences} sequences, {m.max_step_tokens} a step"),
            ("tactics", tuned(tables)),
            ("built by", f"millrace {m.millrace}, engine format {m.format}"),
            *(("note", text) for text in m.notes),
        ]
    )  # fmt: skip
    click.echo()
    heading("Layers")
    table(("modules", "steps", "kernels"), _layers(tables))
    click.echo()
    heading("Fusions")
    table(("times", "kernel", "what", "origin"), _fusions(tables))
    click.echo(f"  passes: {', '.join(program.passes)}")
    click.echo()
    heading("Bytes")
    formats = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in tables.bytes_by_format().items())
    kv = f"{size(memory['kv_bytes_per_sequence'])} a sequence, {size(memory['kv_bytes_batch'])} for {m.max_sequences}"
    bound = f"{size(m.cpu.activation_bytes)}, planned over {len(program.buffers)} buffers; the lower bound is "
    pairs(
        [
            ("weights", f"{size(m.cpu.weights_bytes)} ({formats})"),
            ("KV cache", f"{kv} ({memory['kv_bytes_per_token']:,} bytes a token, {m.kv_format})"),
            ("activations", bound + size(m.cpu.activation_lower_bound)),
            ("peak", size(memory["peak_bytes"])),
        ]
    )


def _layers(tables: Tables) -> list[tuple[str, str, str]]:
    """(which modules, steps, kernels in their order), equal layers in one row."""
    groups: list[tuple[str, list[str]]] = []
    for step in tables.calls:
        module = _module_of(step)
        if not groups or groups[-1][0] != module:
            groups.append((module, []))
        groups[-1][1].append(f"matmul:{step.note}" if step.kernel == "matmul" else step.kernel)
    rows: list[tuple[str, str, list[str]]] = []
    for module, kernels in groups:
        if rows and rows[-1][2] == kernels and ".layers." in f".{module}":
            rows[-1] = (rows[-1][0], module, kernels)
        else:
            rows.append((module, module, kernels))
    return [
        (a if a == b else f"{a} to {b.rpartition('.')[2]}", str(len(kernels)), " ".join(kernels))
        for a, b, kernels in rows
    ]


def _module_of(step: Call) -> str:
    """`model.layers.3`, or the module itself outside of the layers."""
    parts = next((o for o in step.origin if o), step.kernel).split(".")
    if "layers" in parts:
        return ".".join(parts[: parts.index("layers") + 2])
    return ".".join(parts)


def _fusions(tables: Tables) -> list[tuple[str, str, str, str]]:
    """Fused steps with their origin; those that differ only in the layer's number counted together."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for step, what in tables.fusions:
        origin = " + ".join(_short(o, i) for i, o in enumerate(step.origin))
        counted[step.kernel, what, origin] += 1
    return [(str(n), kernel, what, origin) for (kernel, what, origin), n in counted.items()]


def _short(origin: str, i: int) -> str:
    """`layers.*.mlp.gate_proj` for the first, `up_proj` for those beside it."""
    parts = ["*" if part.isdigit() else part for part in origin.removeprefix("model.").split(".")]
    return ".".join(parts) if i == 0 else parts[-1]


def _steps(tables: Tables) -> None:
    rows = []
    for i, step in enumerate(tables.calls):
        p = step.params
        shape = f"{p['n']} x {p['k']}" if step.kernel == "matmul" else str(p.get("n", ""))
        rows.append((str(i), step.kernel, step.note, shape, " + ".join(o for o in step.origin if o)))
    table(("step", "kernel", "note", "shape", "origin"), rows)


def _weights(tables: Tables) -> None:
    rows = [(w.name, " x ".join(map(str, w.shape)), w.format, size(w.bytes)) for w in tables.program.weights]
    table(("weight", "shape", "format", "bytes"), rows)


def _memory(tables: Tables) -> None:
    buffers = tables.program.buffers
    table(("buffer", "bytes", "offset"), [(b.name, f"{b.bytes:,}", f"{b.offset:,}") for b in buffers])
    m = tables.engine.manifest
    click.echo(f"  {m.cpu.activation_bytes:,} bytes in all; no plan needs less than {m.cpu.activation_lower_bound:,}")


def _graph(tables: Tables) -> None:
    rows = [
        (
            " ".join(map(str, n.outputs)),
            n.op,
            " ".join(map(str, n.inputs)),
            ", ".join(" x ".join(map(str, s)) for s in n.shapes),
            " + ".join(n.origin),
        )
        for n in tables.graph.nodes
    ]
    table(("value", "op", "inputs", "shape", "origin"), rows)


def _microseconds(us: float) -> str:
    return f"{us:,.0f} us" if us >= 100 else f"{us:.3g} us"


def _tactics(tables: Tables) -> None:
    table_ = tables.tactics
    rows = []
    for region in table_.regions if table_ else ():
        for choice in region.choices:
            for c in choice.compared:
                tried = ", ".join(
                    f"{'rule' if t.value == 0 else t.value} {_microseconds(t.median_us)}"
                    + ("*" if t.value == c.chosen else "")
                    for t in c.tried
                )
                rows.append((region.name, str(choice.rows), c.knob, tried))
    table(("kernel", "rows", "knob", "tried (median), * chosen"), rows)
    click.echo(f"  {tuned(tables)}")


def _as_json(tables: Tables, part: str | None) -> Any:
    if part == "graph":
        return to_builtins(tables.graph)
    if part == "tactics":
        return to_builtins(tables.tactics)
    if part is not None:
        program = to_builtins(tables.program)
        return program[{"steps": "calls", "weights": "weights", "memory": "buffers"}[part]]
    return tables.summary()


_PARTS: dict[str | None, Callable[[Tables], None]] = {
    None: _summary,
    "steps": _steps,
    "weights": _weights,
    "memory": _memory,
    "tactics": _tactics,
    "graph": _graph,
}
