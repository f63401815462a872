"""Options of `millrace bench`: runs a load on a server and measures latencies and throughput."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from millrace.bench.names import READING
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench import compare_options, infer_options, sweep_options
from millrace.cli.bench.foreign_flags import ForeignFlags, certify_option, png_option
from millrace.cli.options import json_option, settings_options
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.runtime.settings import RunSettings

EPILOG = """\b
Examples:
  millrace bench http://127.0.0.1:8000 --model tiny --concurrency 16 --duration-s 30
  millrace bench URL --model M --request-rate 4 --isl 1000 --osl 200 --goodput ttft:500 itl:50
  millrace bench URL --model M --input-file trace.jsonl --replay-speed 2 -o results/
  millrace bench --engine tiny --isl 128 --osl 128 --request-count 64
  millrace bench --engine ./llama-3.1-8b --device cuda --random-weights --precision fp8 --max-batch 512
  millrace bench URL --model M --pattern short/long --pattern long/short:2 --json
  millrace bench sweep --help        raise the load until a limit breaks
  millrace bench compare --help      two servers or results: which is faster, with confidence
  millrace bench infer --help        tensor models over KServe's protocol"""

PARTS = {"sweep": sweep_options.command, "compare": compare_options.command, "infer": infer_options.command}


class Bench(ForeignFlags):
    """`bench URL ...`, with subcommands such as `bench sweep ...`."""

    parts: Mapping[str, click.Command] = PARTS

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        part = PARTS.get(args[0]) if args else None
        if part is None:
            return super().make_context(info_name, args, parent, **extra)
        return part.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@click.command(cls=Bench, epilog=EPILOG)
@click.argument("url", required=False)
@click.option("--url", "url_given", hidden=True, help="The URL, as other tools take it.")
@settings_options(TargetSettings, LoadSettings, InputSettings, SessionSettings)
@click.option("--goodput", multiple=True, metavar="METRIC:MS", help=f"Latency limits of good requests; or {READING}.")
@click.option("--engine", metavar="MODEL", help="Instead of a URL: a model or engine in this process, without HTTP.")
@settings_options(BuildSettings, RunSettings)
@certify_option
@click.option("-o", "--output", type=Path, metavar="FOLDER", help="Folder for results, also in other tools' formats.")
@png_option
@json_option
@click.pass_obj
def command(
    env: Env,
    /,
    url: str | None,
    url_given: str | None,
    goodput: tuple[str, ...],
    engine: str | None,
    certify_s: float,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure latency and throughput of a server.

    URL is any server of OpenAI's protocol. Equivalent flags of GenAI-Perf, AIPerf and `vllm bench serve` are accepted.
    Ctrl-C ends the run and reports the results so far. With --engine, all requests are queued at once unless
    --concurrency or --request-rate is given, and prompts are random tokens.
    """
    from millrace.cli.bench.run import run  # imported when it runs: --help needs none of it

    run(
        env,
        url=url,
        url_given=url_given,
        goodput=goodput,
        engine=engine,
        certify_s=certify_s,
        output=output,
        as_json=as_json,
        **options,
    )
