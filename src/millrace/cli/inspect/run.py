"""Runs `millrace inspect`, whose options are in `options.py`: `--help` imports nothing else."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import to_builtins

from millrace.cli.console import heading, note, pairs, print_json, progress, size, table
from millrace.cli.engine_tables import Tables, candidate_losses, fusions_by_place, kernel_of, note_of, tuning_text
from millrace.cli.html_output import write_page
from millrace.cli.inspect.engine_page import engine_page, layers_of
from millrace.compile.cache.rooflines import load_roofline
from millrace.compile.resolve_model import find_built
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from millrace.report.format_numbers import format_count

THE_MODEL = "(the model)"  # the origin of what its own forward() does


def run(env: Env, engine: str, part: str | None, html: Path | None, as_json: bool) -> None:
    """Run `millrace inspect`."""
    if html is not None and part is not None:
        raise ConfigError(f"--{part} and --html are both given", "one of them", "leave one out: the page has it all")
    with progress(as_json) as report:
        tables = Tables(Engine.open(find_built(engine, env, report)))
    if html is not None:
        nbytes = write_page(html, engine_page(tables, load_roofline(env.cache, usable_isas()[0], usable_cores())))
        if as_json:
            print_json({"html": str(html), "bytes": nbytes})
        else:
            note(f"{html}: {size(nbytes)}, for a browser")
    elif as_json:
        print_json(_as_json(tables, part))
    else:
        _PARTS[part](tables)


def _summary(tables: Tables) -> None:
    m, memory, program = tables.engine.manifest, tables.memory(), tables.program
    vocabulary = f", vocabulary {m.vocab_size:,}" if m.vocab_size else ""
    heading(f"{m.model_name}  ({tables.engine.folder})")
    pairs(
        [
            ("model", f"{m.architecture}, {format_count(m.n_parameters)} parameters" + vocabulary),
            ("precision", tables.precision()),
            ("accuracy", m.evaluation.summary),
            ("limits", tables.limits),
            ("tactics", tuning_text(tables)),
            ("built by", f"millrace {m.millrace}, engine format {m.format}"),
            *(("note", text) for text in m.notes),
        ]
    )  # fmt: skip
    if len(m.evaluation.tried) > 1:
        click.echo()
        heading("Precisions tried")
        table(("precision", "KL, nats", "perplexity", "same token", "weights of a step"), candidate_losses(tables))
    click.echo()
    heading("Layers")
    table(("modules", "calls", "kernels"), _layers(tables))
    click.echo()
    heading("Fusions")
    table(("times", "kernel", "what", "origin"), fusions_by_place(tables))
    click.echo(f"  passes: {', '.join(program.passes)}")
    click.echo()
    heading("Bytes")
    formats = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in tables.bytes_by_format().items())
    bound = f"{size(m.cpu.activation_bytes)}, planned over {len(program.buffers)} buffers; the lower bound is "
    pairs(
        [
            ("weights", f"{size(m.cpu.weights_bytes)} ({formats})"),
            *([("KV cache", _kv_cache(tables, memory))] if tables.of_texts else []),
            ("activations", bound + size(m.cpu.activation_lower_bound)),
            ("peak", size(memory["peak_bytes"])),
        ]
    )


def _kv_cache(tables: Tables, memory: Mapping[str, int]) -> str:
    m = tables.engine.manifest
    kv = f"{size(memory['kv_bytes_per_sequence'])} a sequence, {size(memory['kv_bytes_batch'])} for {m.max_sequences}"
    if m.is_encoder:
        return "none"
    full = tables.engine.window_page_bytes(0) // PAGE_TOKENS
    if not tables.engine.windows:
        return f"{kv} ({full:,} bytes a token, {m.kv_format})"
    windows = ", ".join(
        f"{tables.engine.window_page_bytes(window) // PAGE_TOKENS:,} for each of the last {window:,}"
        for window in tables.engine.windows
    )
    return f"{kv} ({full:,} bytes a token, and {windows}; {m.kv_format})"


def _layers(tables: Tables) -> list[tuple[str, str, str]]:
    """Return (modules, calls, kernels in order); equal layers share a row."""
    rows: list[tuple[str, str, list[str]]] = []
    for layer in layers_of(tables.calls):
        module, kernels = layer.name, layer.kernels
        stem, _, number = module.rpartition(".")
        if rows and rows[-1][2] == kernels and number.isdigit() and rows[-1][1].rpartition(".")[0] == stem:
            rows[-1] = (rows[-1][0], module, kernels)
        else:
            rows.append((module, module, kernels))
    return [
        (a if a == b else f"{a} to {b.rpartition('.')[2]}", str(len(kernels)), " ".join(kernels))
        for a, b, kernels in rows
    ]


def _calls(tables: Tables) -> None:
    rows = []
    for i, call in enumerate(tables.calls):
        p = call.params
        shape = f"{p['n']} x {p['k']}" if call.kernel == "matmul" else str(p.get("n", ""))
        origin = " + ".join(o for o in call.origin if o)
        rows.append((str(i), kernel_of(call), note_of(call), shape, origin, tables.fused(call)))
    table(("call", "kernel", "note", "shape", "origin", "fused"), rows)


def _weights(tables: Tables) -> None:
    rows = [(w.name, " x ".join(map(str, w.shape)), w.format, size(w.bytes)) for w in tables.program.weights]
    table(("weight", "shape", "format", "bytes"), rows)


def _memory(tables: Tables) -> None:
    buffers = tables.program.buffers
    rows = [(b.name, f"{b.bytes:,}", f"{b.offset:,}", f"{b.first} to {b.last}") for b in buffers]
    table(("buffer", "bytes", "offset", "calls"), rows)
    m = tables.engine.manifest
    click.echo(f"  {m.cpu.activation_bytes:,} bytes in all; no plan needs less than {m.cpu.activation_lower_bound:,}")


def _graph(tables: Tables) -> None:
    """Return the rows of the graph: inputs first, as values are numbered, outputs last."""
    graph = tables.graph
    shapes: dict[int | str, list[int | str]] = {i: p.shape for i, p in enumerate(graph.inputs)}
    for node in graph.nodes:
        shapes |= zip(node.outputs, node.shapes, strict=False)
    rows = [(str(i), f"input {p.name}", "", _shape(p.shape), p.dtype, "") for i, p in enumerate(graph.inputs)]
    rows += [
        (
            _words(n.outputs), n.op, _words(n.inputs), ", ".join(map(_shape, n.shapes)), n.expression,
            " + ".join(o or THE_MODEL for o in n.origin),
        )
        for n in graph.nodes
    ]  # fmt: skip
    rows += [("", f"output {p.name}", str(p.value), _shape(shapes.get(p.value, [])), "", "") for p in graph.outputs]
    table(("value", "op", "inputs", "shape", "what", "origin"), rows)


def _words(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def _shape(dims: Sequence[int | str]) -> str:
    return " x ".join(map(str, dims))


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
    click.echo(f"  {tuning_text(tables)}")


def _as_json(tables: Tables, part: str | None) -> Any:
    if part == "graph":
        return to_builtins(tables.graph)
    if part == "tactics":
        return to_builtins(tables.tactics)
    if part is not None:
        program = to_builtins(tables.program)
        return program[{"memory": "buffers"}.get(part, part)]
    return tables.summary()


_PARTS: dict[str | None, Callable[[Tables], None]] = {
    None: _summary,
    "calls": _calls,
    "weights": _weights,
    "memory": _memory,
    "tactics": _tactics,
    "graph": _graph,
}
