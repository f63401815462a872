"""Runs `millrace demo`, whose options are in `options.py`: `--help` imports nothing else."""

import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from millrace.api.offline_generate import generate
from millrace.bench.client.demo_client import ChatResult, DemoChatRequest, ask, ask_all, quantile
from millrace.bench.run.server_process import ServerProcess
from millrace.cli.console import heading, note, pairs, print_json, size
from millrace.cli.engine_tables import Tables
from millrace.compile.builder import build_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.decode_roofline import DecodeWork
from millrace.engine.roofline_probe import roofline_here
from millrace.errors import MachineError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import cpu_model, load, usable_cores
from millrace.machine.roofline import Roofline
from millrace.report.format_numbers import format_count
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import open_engine
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.settings import RunSettings

QUESTION = "Tell me a story about a fox named Ravi."
KINDS = ("fox", "lion", "dog", "cow", "tiger", "bear", "goat", "frog")
CONCURRENCY, ROUNDS, LOAD_TOKENS = 16, 2, 64


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All measurements of the demo."""

    busy: float  # processes that wanted to run in the minute before
    tables: Tables
    build_s: float
    roofline: Roofline
    ready_s: float
    answer: ChatResult
    answers: list[ChatResult]
    load_s: float
    stop_s: float
    engine_tokens_per_s: float  # the same load in one process, without HTTP


def run(as_json: bool) -> None:
    """Run `millrace demo`."""
    say = (lambda text: None) if as_json else note
    with tempfile.TemporaryDirectory(prefix="millrace-demo-") as folder:
        results = _journey(Path(folder), say, as_json)
        report = _report(results)
        if as_json:
            print_json(report)
        else:
            _show(results, report)


def _journey(folder: Path, say: Any, quiet: bool) -> DemoReport:
    busy = load()
    say("Measuring this machine ...")
    roofline = roofline_here(usable_isas()[0], usable_cores())
    say("Building `tiny` into an engine ...")
    tables, build_s = _build(folder / "tiny.engine")
    say("Starting `millrace serve` ...")
    with ServerProcess(tables.engine.folder, ("--log-level", "warning")) as server:
        answer = _ask(server.url, quiet)
        say(f"Load: {CONCURRENCY} clients at a time, {ROUNDS * CONCURRENCY} requests of {LOAD_TOKENS} tokens ...")
        heard, load_s = ask_all(server.url, _load(), CONCURRENCY)
        stop_s = _stop(server)
    engine_tokens_per_s = _without_http(tables.engine)
    return DemoReport(
        busy, tables, build_s, roofline, server.ready_s, answer, heard, load_s, stop_s, engine_tokens_per_s
    )


def _build(folder: Path) -> tuple[Tables, float]:
    start_s = time.perf_counter()
    engine = build_engine("tiny", BUNDLED / "tiny", folder, BuildSettings())
    return Tables(engine), time.perf_counter() - start_s


def _ask(url: str, quiet: bool) -> ChatResult:
    """Ask one question, and show the answer as it arrives."""
    if quiet:
        return ask(url, DemoChatRequest(QUESTION, 128, seed=1))
    click.echo(f"\n  {click.style('you  ', fg='cyan')} {QUESTION}\n  {click.style('tiny ', fg='green')} ", nl=False)
    answer = ask(url, DemoChatRequest(QUESTION, 128, seed=1), lambda text: click.echo(text, nl=False))
    click.echo("\n")
    return answer


def _load() -> list[DemoChatRequest]:
    texts = [f"Tell me a story about a {KINDS[i % len(KINDS)]}." for i in range(ROUNDS * CONCURRENCY)]
    return [DemoChatRequest(text, LOAD_TOKENS, seed=i, ignore_eos=True) for i, text in enumerate(texts)]


def _stop(server: ServerProcess) -> float:
    """Send SIGTERM during an answer, which must still complete. raises MachineError"""
    started, heard = threading.Event(), list[ChatResult]()
    request = DemoChatRequest(QUESTION, LOAD_TOKENS, seed=2, ignore_eos=True)
    reader = threading.Thread(target=lambda: heard.append(ask(server.url, request, lambda text: started.set())))
    reader.start()
    started.wait(30)
    server.terminate()
    stop_s = server.wait()
    reader.join()
    if not heard or heard[0].n_output != LOAD_TOKENS:
        raise MachineError("an answer was cut off by SIGTERM", "running answers to be finished", "report it")
    return stop_s


def _without_http(engine: Engine) -> float:
    """Return the output tokens per second of the same load in this process, the best of three."""
    model = open_engine("tiny", engine, RunSettings())
    try:
        loop = model.loop()
        prompts = [loop.tokenizer.encode(request.text) for request in _load()]
        params = [SamplingParams(max_tokens=LOAD_TOKENS, seed=request.seed, ignore_eos=True) for request in _load()]
        return max(_rate(loop, prompts, params) for _ in range(3))
    finally:
        model.close()


def _rate(loop: EngineLoop, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    start_s = time.perf_counter()
    outputs = generate(loop, prompts, params)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start_s)


def _report(results: DemoReport) -> dict[str, Any]:
    """Convert the results to JSON data."""
    heard = results.answers
    ttft, gaps, pauses = (
        [h.ttft_s for h in heard],
        [h.inter_token_s for h in heard],
        [p for h in heard for p in h.pauses_s],
    )
    n_context = sum(h.n_prompt + h.n_output // 2 for h in heard) // len(heard)
    bound = DecodeWork.from_engine(results.tables.engine).bound(results.roofline, CONCURRENCY, CONCURRENCY * n_context)
    rate = sum(h.n_output for h in heard) / results.load_s
    limit = CONCURRENCY / bound.seconds
    return {
        "machine": cpu_model(),
        "cores": usable_cores(),
        "load_before": results.busy,
        "engine": results.tables.summary(),
        "build_s": results.build_s,
        "ready_s": results.ready_s,
        "answer": results.answer.text,
        "load": {
            "concurrency": CONCURRENCY,
            "requests": len(heard),
            "tokens_each": LOAD_TOKENS,
            "seconds": results.load_s,
        },
        "ttft_s": {"p50": quantile(ttft, 0.5), "p99": quantile(ttft, 0.99)},
        "inter_token_s": {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99)},
        "pause_s": {"p50": quantile(pauses, 0.5), "p99": quantile(pauses, 0.99)},
        "tokens_per_s": rate,
        "engine_tokens_per_s": results.engine_tokens_per_s,
        "limit": {"tokens_per_s": limit, "bound_by": bound.by, "step_s": bound.seconds},
        "share_of_limit": rate / limit,
        "engine_share_of_limit": results.engine_tokens_per_s / limit,
        "stop_s": results.stop_s,
        "roofline": results.roofline.as_dict(),
    }


def _show(results: DemoReport, report: dict[str, Any]) -> None:
    m, memory = results.tables.engine.manifest, results.tables.memory()
    ttft, gaps, limit = report["ttft_s"], report["inter_token_s"], report["limit"]
    heading("What was built")
    pairs(
        [
            ("model", f"{m.model_name}, {format_count(m.n_parameters)} parameters in {results.tables.precision()}"),
            ("engine", f"{len(results.tables.calls)} steps, weights {size(memory['weights_bytes'])}, "
                       f"KV {size(memory['kv_bytes_per_sequence'])} a sequence, built in {results.build_s:.1f} s"),
            ("ready", f"{results.ready_s:.1f} s after the server's process started"),
        ]
    )  # fmt: skip
    click.echo()
    heading(f"What {CONCURRENCY} clients at a time saw, on {report['cores']} cores of {report['machine']}")
    pairs(
        [
            ("first token", f"{ttft['p50'] * 1e3:.0f} ms median, {ttft['p99'] * 1e3:.0f} ms p99"),
            ("next token", f"{gaps['p50'] * 1e3:.1f} ms median, {gaps['p99'] * 1e3:.1f} ms p99 of the answers' means; "
                           f"pauses in the stream up to {report['pause_s']['p99'] * 1e3:.0f} ms (p99)"),
            ("tokens", f"{report['tokens_per_s']:,.0f} a second together; "
                       f"{report['engine_tokens_per_s']:,.0f} from the engine alone, without HTTP and its clients"),
            ("limit here", f"{limit['tokens_per_s']:,.0f} a second by {limit['bound_by']}; "
                           f"served {report['share_of_limit']:.1%} of it, "
                           f"the engine alone {report['engine_share_of_limit']:.1%}"),
            ("stopped", f"by SIGTERM in {results.stop_s:.1f} s, the running answer finished first"),
        ]
    )  # fmt: skip
    if results.busy > report["cores"] / 2:
        click.echo(
            f"  Other processes were busy here (load {results.busy:.1f}): on an idle machine all of this is faster."
        )
    click.echo()
    heading("Where to go next")
    pairs(
        [
            ("millrace chat tiny", "talk to it in this terminal"),
            ("millrace serve MODEL", "a checkpoint of yours, a hub id, or tiny, for every OpenAI client"),
            ("millrace doctor", "what this machine can do, and what holds it back"),
            ("millrace --help", "the rest"),
        ]
    )
