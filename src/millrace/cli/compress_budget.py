"""`millrace compress --max-loss`: the cheapest mix of formats within a loss, searched, measured, and written down."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.compress_asked import Sampling, command_line, opened, statistics_for
from millrace.cli.screen import Progress, heading, pairs, print_json, progress, size, table
from millrace.cli.signals import ended_in_order
from millrace.compress.budget import MaxLoss
from millrace.compress.candidates import Shelf
from millrace.compress.cost import ROWS, Target
from millrace.compress.folder import check_place
from millrace.compress.measure import Loss, held_out_for, why_not, windows_for
from millrace.compress.page import write_page
from millrace.compress.plan import plan
from millrace.compress.recipe import PRESETS
from millrace.compress.search import RECIPE, Asked, Found, Texts, described, most_bytes, search
from millrace.env import Env
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores

_MOST_ROWS = 4096
_SHOWN = 12  # mixes of a table
Command = Callable[..., None]
_OPTIONS = (
    click.option("--max-loss", metavar="1%|kl:0.01",
                 help="Instead of --recipe: search the cheapest mix of formats that loses at most so much. 1%: growth "
                      "of perplexity, on the text and as KL foretells it; kl:0.01: nats a token."),
    click.option("--target", type=click.Choice([*map(str, Target)]), help="What is to be small, with --max-loss: "
                 "the time of a step of few rows or of many, timed on this machine, or bytes; default: latency."),
    click.option("--batch", type=click.IntRange(1, _MOST_ROWS), metavar="N",
                 help=f"Rows of a step; default: {ROWS[Target.LATENCY]} for latency, {ROWS[Target.THROUGHPUT]} for "
                      "throughput."),
)  # fmt: skip


def or_searched(plain: Command) -> Command:
    """The command that takes a recipe, or with --max-loss searches one. raises ConfigError for both, or neither"""

    @wraps(plain)
    def either(env: Env, /, max_loss: str | None, target: str | None, batch: int | None, **given: Any) -> None:
        if max_loss is None:
            for option, value in (("--target", target), ("--batch", batch)):
                if value is not None:
                    raise ConfigError(f"{option} is given without --max-loss", "both", "say how much may be lost")
            plain(env, **given)
            return
        started_s = time.perf_counter()
        asked = _given(MaxLoss.parse(max_loss), Target(target or Target.LATENCY), batch, given)
        sampling = Sampling(given["samples_from"], given["samples"], given["statistics"])
        with ended_in_order(), progress(given["as_json"]) as report:
            found = _searched(opened(given["model"], env, report), asked, sampling, report)
        seconds = time.perf_counter() - started_s
        write_page(asked.out, {"command": command_line(given["model"]), "seconds": seconds})
        if given["as_json"]:
            print_json(_as_json(found, asked.out, seconds))
        else:
            _show(found, asked.out, seconds)

    for option in reversed(_OPTIONS):
        either = option(either)
    return either


@dataclass(frozen=True, slots=True)
class _Given:
    """calibration: the text to measure on"""

    search: Asked
    out: Path
    calibration: str | None


def _given(bound: MaxLoss, target: Target, batch: int | None, given: dict[str, Any]) -> _Given:
    """raises ConfigError for options that do not go together"""
    for option, wrong in (("--recipe", given["recipe"] is not None), ("--dry-run", given["dry_run"]),
                          ("--no-evaluate", not given["evaluate"]), ("--measure", given["again"])):  # fmt: skip
        if wrong:
            raise ConfigError(f"--max-loss and {option} are given", "one of both", "leave one out")
    if given["measure_speed"] or given["mmlu"] is not None or given["questions"] is not None:
        raise ConfigError(
            "--max-loss is given with more to measure", "the loss alone, which decides",
            "leave that out, and measure it afterwards: --measure",
        )  # fmt: skip
    if target == Target.MEMORY and batch is not None:
        raise ConfigError("--batch is given for --target memory", "a target of time", "leave --batch out")
    rows = 0 if target == Target.MEMORY else batch or ROWS[target]
    return _Given(Asked(bound, target, rows, usable_isas()[0], usable_cores()), given["output"], given["calibration"])


def _searched(checkpoint: Checkpoint, asked: _Given, sampling: Sampling, report: Progress) -> Found:
    sampling.check("--max-loss", True, asked.calibration)
    without = why_not(checkpoint)
    if without:
        raise CheckpointError(f"no loss can be measured: {without}", "a model that reads texts", "name a --recipe")
    job = plan(checkpoint, PRESETS["int8-wo"])
    check_place(asked.out, most_bytes(job) + sampling.temporary_bytes(job))
    text = Calibration.open(asked.calibration)
    texts = Texts(text, windows_for(checkpoint, text), held_out_for(checkpoint, text))
    sampling.check_text(checkpoint, text)
    with statistics_for(job, asked.out, sampling, report) as statistics:
        kept = Shelf.beside(sampling.statistics) if sampling.statistics else None
        return search(job, asked.search, statistics, texts, asked.out, report, kept)


def _as_json(found: Found, out: Path, seconds: float) -> dict[str, Any]:
    job = found.result.job
    return {
        "folder": str(out), "recipe": str(out / RECIPE), "seconds": seconds, "formats": _formats(found),
        "bits_per_weight": job.bits_per_weight, "bytes_before": job.bytes_before, "bytes_after": job.bytes_after,
        "loss": asdict(found.loss), **described(found),
    }  # fmt: skip


def _formats(found: Found) -> dict[str, int]:
    """How many layers have each."""
    return dict(Counter(candidate.format for candidate in found.mix.chosen.values()).most_common())


def _show(found: Found, out: Path, seconds: float) -> None:
    asked, bound, loss = found.asked, found.asked.bound, found.loss
    job, cost = found.result.job, partial(_cost, found.asked)
    heading(f"{out}: the cheapest that was found within {bound.said(bound.bound)} ({bound.kind})")
    rows = "one row" if asked.rows == 1 else f"{asked.rows} rows"
    what = f"of a step of {rows}, on {asked.threads} threads ({asked.isa})" if asked.rows else "in bytes"
    _frontier(found, cost)
    kept = ", ".join(f"{n} {format}" for format, n in _formats(found).items())
    pairs([
        ("cost", f"{cost(found.mix.cost)} {what}, all linear layers; as floats {cost(found.floats)}"),
        ("layers", kept),
        ("bytes", f"{size(job.bytes_before)} -> {size(job.bytes_after)}, {job.bits_per_weight:.3f} bits a weight of "
                  "what is compressed"),
        ("chosen by", _said(found, found.choice)),
        ("proven", _said(found, found.proof) + ", on other windows" if found.proof else
                   "not on other windows: the text has no more"),
        ("perplexity", f"{loss.perplexity:.3f}, the source's {loss.source_perplexity:.3f}, in fp32"),
        ("same token", f"{loss.agreement:.1%} of the likeliest"),
        ("again", f"--recipe {out / RECIPE}" + (", with the same --statistics" if job.calibrated else "")),
        ("time", f"{seconds:.0f} s"),
    ])  # fmt: skip


def _said(found: Found, loss: Loss) -> str:
    """With its error, and whether it is within the bound."""
    bound, off = found.asked.bound, "" if loss.kl_error is None else f" ± {loss.kl_error:.1g}"
    beyond = "" if bound.of(loss) <= bound.bound else ", BEYOND THE BOUND"
    return f"{bound.said(bound.of(loss))} ({bound.kind}{beyond}), KL {loss.kl:.3g}{off} on {loss.tokens:,} tokens"


def _frontier(found: Found, cost: Callable[[float], str]) -> None:
    """Those that were measured, and some between them."""
    mixes, measured = found.search.mixes, found.search.measured
    between = {round(i * (len(mixes) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)}

    def said(value: float | None) -> str:
        return "" if value is None else found.asked.bound.said(value)

    table(("mix", "cost", "predicted loss", "measured", ""), [
        (str(i), cost(mixes[i].cost), said(found.search.predicted(i)), said(measured.get(i)),
         "<- found" if i == found.search.found else "")
        for i in sorted(between | measured.keys())
    ])  # fmt: skip


def _cost(asked: Asked, value: float) -> str:
    return size(value) if not asked.rows else f"{value * 1e3:.3f} ms"
