"""`millrace eval --task wikitext` and `--task kl`: perplexity of a text, and divergence from a reference on it."""

from contextlib import closing
from typing import Any

import numpy as np

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.console import heading, pairs, print_json, progress
from millrace.cli.eval.request import EvalOptions, as_json, with_error
from millrace.cli.open_model import opened
from millrace.compile.resolve_model import model_folder
from millrace.compile.source import Source
from millrace.engine.artifact.manifest import MANIFEST
from millrace.errors import ConfigError
from millrace.evaluate.divergence import Mean
from millrace.evaluate.kl_agreement import Agreement, AgreementReport, agreement, check_window, compare
from millrace.evaluate.multiple_choice import digest
from millrace.evaluate.perplexity import LM_EVAL, Sums, WindowedText, cut, measure, perplexities, window_of
from millrace.evaluate.resumable_results import ResultsInputs, ResumableResults, precision_summary
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_files import read_text
from millrace.evaluate.text_windows import Windows, windows
from millrace.runtime.open_engine import RunningModel

_MAX_BYTES = 16 << 20
_ERRORS = {True: "over documents", False: "over tokens, as if they were independent"}


def perplexity_of(options: EvalOptions) -> None:
    text = _text(options)
    with opened(
        options.model, options.build, options.run, options.env, sequences=1, quiet=options.as_json, one_table=True
    ) as model:
        context = model.executor.limits.context_tokens
        read = cut(options.definition, text, model.tokenizer, options.window, context)
        mine = ResultsInputs.from_model(model, read.name, digest(text))
        with (
            closing(ResumableResults(options.results_file(mine, options.out), mine, Sums)) as results,
            progress(options.as_json) as report,
        ):
            sums = measure(model.native, read, options.limit, results, report)
    values, n = perplexities(options.definition, sums), sum(window_sum.n for window_sum in sums)
    if options.as_json:
        print_json({
            **mine.summary(), "definition": read.definition, "window": read.window, "bos": read.bos, "tokens": n,
            read.unit: len(sums), **{name.replace(" ", "_"): as_json(mean) for name, mean in values.items()},
        })  # fmt: skip
        return
    heading(f"{mine.model}: wikitext, as {read.definition} defines it")
    pairs(
        [
            *((name, with_error(mean)) for name, mean in values.items()),
            *([("error", f"standard, {_ERRORS[read.definition == LM_EVAL]}")] if len(sums) > 1 else []),
            *_read(read, len(sums), n),
            ("precision", mine.precision),
        ]
    )


def _read(read: WindowedText, n_units: int, n: int) -> list[tuple[str, str]]:
    total = "" if n_units == len(read.units) else f" of {len(read.units):,}"
    return [
        ("window", f"{read.window:,} tokens"), ("BOS", read.bos),
        ("tokens", f"{n:,} predicted, in {n_units:,}{total} {read.unit}"),
    ]  # fmt: skip


def agreement_with(options: EvalOptions) -> None:
    text, model = _text(options), options.against or options.model
    build = options.build_of_other(model, None if options.against else _own_float(options))
    quiet = options.as_json
    with (
        opened(model, build, options.run, options.env, sequences=1, quiet=quiet, one_table=True) as reference,
        opened(
            options.model, options.build, options.run, options.env, sequences=1, quiet=quiet, one_table=True
        ) as compared,
    ):
        mine, read = _prepare_comparison(options, text, compared, reference)
        with (
            closing(ResumableResults(options.results_file(mine, options.out), mine, AgreementReport)) as results,
            progress(quiet) as report,
        ):
            tokens = compare(compared.native, reference.native, read, options.limit, results, report)
        other = {"model": reference.name, "precision": precision_summary(reference)}
        bos = "at each window" if compared.tokenizer.special_around[0] else "none"
    result, (n_windows, window) = agreement(tokens), read.ids[: options.limit].shape
    if quiet:
        print_json(
            {
                **mine.summary(),
                "against": other,
                "window": window,
                "bos": bos,
                "tokens": result.n,
                "windows": n_windows,
                **_as_json(result),
            }
        )
        return
    heading(f"{mine.model} beside {other['model']} ({other['precision']})")
    pairs(
        [
            *_table_rows(result),
            ("window", f"{window:,} tokens, whose second half is scored"),
            ("BOS", bos),
            ("tokens", f"{result.n:,} predicted, in {n_windows:,} windows"),
            ("precision", mine.precision),
        ]
    )


def _prepare_comparison(
    options: EvalOptions, text: str, model: RunningModel, reference: RunningModel
) -> tuple[ResultsInputs, Windows]:
    """Check that two models are comparable, and tokenise the text. raises ConfigError"""
    mine, theirs = (opened.engine.manifest for opened in (model, reference))
    if mine.identity == theirs.identity:
        raise ConfigError(
            f"{model.name} and the reference are the same engine ({precision_summary(model)})",
            "two that differ",
            "name a --precision for this one, or another model: --against MODEL",
        )
    context = min(opened.executor.limits.context_tokens for opened in (model, reference))
    length = window_of(options.window, LENGTH, context)
    check_window(length, max(mine.vocab_size, theirs.vocab_size))
    read, other = (windows(opened.tokenizer, text, length) for opened in (model, reference))
    if mine.vocab_size != theirs.vocab_size or not np.array_equal(read.ids, other.ids):
        raise ConfigError(
            f"{model.name} and {reference.name} have other vocabularies, or read the text as other tokens",
            "two models of one tokenizer", "name another reference: --against MODEL",
        )  # fmt: skip
    total = f"kl, window {read.ids.shape[1]}, against {precision_summary(reference)}"
    return ResultsInputs.from_model(model, total, digest((text, theirs.identity))), read


def _own_float(options: EvalOptions) -> str | None:
    """Return the precision of a reference of the same checkpoint: its own float type, or fp32 if it is quantised.

    raises ConfigError for an engine, which has a single precision
    """
    _, folder = model_folder(options.model, options.env)
    if (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{options.model} is built already, in one precision: there is no reference", "a checkpoint, or --against",
            "name the reference: --against MODEL",
        )  # fmt: skip
    own = Source.from_checkpoint(Checkpoint.open(folder)).own_precision
    quantised = own.default.coded or any(p.coded for _, p in own.patterns)
    return "fp32" if quantised else None


def _text(options: EvalOptions) -> str:
    assert options.data is not None, "the command has looked"
    return read_text(options.data, "--data", _MAX_BYTES, "a text file, like WikiText's wiki.test.raw")


def _table_rows(result: Agreement) -> list[tuple[str, str]]:
    median, high, largest = result.at.values()
    return [
        ("mean KL", f"{with_error(result.divergence, '.6f')} nats a token"),
        ("its distribution", f"median {median:.6f}, 99 % below {high:.6f}, largest {largest:.6f}"),
        ("same likeliest", f"{with_error(_percent(result.same), '.2f')} % of tokens"),
        ("change of p", f"RMS {with_error(_percent(result.rms_change), '.3f')} points of the right token's, "
                        f"mean {with_error(_percent(result.change), '.3f')}"),
        ("perplexity", f"{with_error(result.perplexity)}, the reference's {with_error(result.reference_perplexity)}"),
        ("their ratio", with_error(result.ratio, ".5f")),
    ]  # fmt: skip


def _percent(mean: Mean) -> Mean:
    return mean.through(100 * mean.value, 100)


def _as_json(result: Agreement) -> dict[str, Any]:
    median, high, largest = result.at.values()
    return {
        "kl": {**as_json(result.divergence), "median": median, "99%": high, "largest": largest},
        "same_likeliest": as_json(result.same), "rms_change": as_json(result.rms_change),
        "mean_change": as_json(result.change), "perplexity": as_json(result.perplexity),
        "reference_perplexity": as_json(result.reference_perplexity), "ratio": as_json(result.ratio),
    }  # fmt: skip
