"""`millrace eval --task wikitext` and `--task kl`: perplexity of a text, and how far from a reference on it."""

from contextlib import closing
from typing import Any

import numpy as np

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.console import heading, pairs, print_json, progress
from millrace.cli.eval.request import EvalOptions, about, as_json, precision_of, told, with_error
from millrace.cli.open_model import opened
from millrace.compile.resolve_model import model_folder
from millrace.compile.source import Source
from millrace.engine.artifact.manifest import MANIFEST
from millrace.errors import ConfigError
from millrace.evaluate.divergence import Mean
from millrace.evaluate.kl_agreement import Agreement, AgreementReport, agreement, check_window, compare
from millrace.evaluate.multiple_choice import digest
from millrace.evaluate.perplexity import LM_EVAL, Sums, WindowedText, cut, measure, perplexities, window_of
from millrace.evaluate.resumable_results import About, ResumableResults
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_files import read_text
from millrace.evaluate.text_windows import Windows, windows
from millrace.runtime.open_engine import RunningModel

_MOST_BYTES = 16 << 20
_ERRORS = {True: "over documents", False: "over tokens, as if they were independent"}


def perplexity_of(asked: EvalOptions) -> None:
    text = _text(asked)
    with opened(
        asked.model, asked.build, asked.run, asked.env, sequences=1, quiet=asked.as_json, one_table=True
    ) as found:
        context = found.executor.limits.context_tokens
        read = cut(asked.definition, text, found.tokenizer, asked.window, context)
        mine = about(found, read.name, digest(text))
        with (
            closing(ResumableResults(asked.kept_at(mine, asked.out), mine, Sums)) as kept,
            progress(asked.as_json) as report,
        ):
            sums = measure(found.native, read, asked.limit, kept, report)
    values, n = perplexities(asked.definition, sums), sum(one.n for one in sums)
    if asked.as_json:
        print_json({
            **told(mine), "definition": read.definition, "window": read.window, "bos": read.bos, "tokens": n,
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
    of = "" if n_units == len(read.units) else f" of {len(read.units):,}"
    return [
        ("window", f"{read.window:,} tokens"), ("BOS", read.bos),
        ("tokens", f"{n:,} predicted, in {n_units:,}{of} {read.unit}"),
    ]  # fmt: skip


def agreement_with(asked: EvalOptions) -> None:
    text, model = _text(asked), asked.against or asked.model
    build = asked.build_of_other(model, None if asked.against else _own_float(asked))
    quiet = asked.as_json
    with (
        opened(model, build, asked.run, asked.env, sequences=1, quiet=quiet, one_table=True) as reference,
        opened(asked.model, asked.build, asked.run, asked.env, sequences=1, quiet=quiet, one_table=True) as found,
    ):
        mine, read = _beside(asked, text, found, reference)
        with (
            closing(ResumableResults(asked.kept_at(mine, asked.out), mine, AgreementReport)) as kept,
            progress(quiet) as report,
        ):
            tokens = compare(found.native, reference.native, read, asked.limit, kept, report)
        other = {"model": reference.name, "precision": precision_of(reference)}
        bos = "at each window" if found.tokenizer.special_around[0] else "none"
    result, (n_windows, window) = agreement(tokens), read.ids[: asked.limit].shape
    if quiet:
        print_json({
            **told(mine), "against": other, "window": window, "bos": bos, "tokens": result.n, "windows": n_windows,
            **_as_json(result),
        })  # fmt: skip
        return
    heading(f"{mine.model} beside {other['model']} ({other['precision']})")
    pairs(
        [
            *_shown(result),
            ("window", f"{window:,} tokens, whose second half is scored"), ("BOS", bos),
            ("tokens", f"{result.n:,} predicted, in {n_windows:,} windows"), ("precision", mine.precision),
        ]
    )  # fmt: skip


def _beside(asked: EvalOptions, text: str, found: RunningModel, reference: RunningModel) -> tuple[About, Windows]:
    """raises ConfigError where there is nothing to compare, not the same tokens, or too much of it at once"""
    mine, theirs = (one.engine.manifest for one in (found, reference))
    if mine.identity == theirs.identity:
        raise ConfigError(
            f"{found.name} and the reference are the same engine ({precision_of(found)})", "two that differ",
            "name a --precision for this one, or another model: --against MODEL",
        )  # fmt: skip
    context = min(one.executor.limits.context_tokens for one in (found, reference))
    length = window_of(asked.window, LENGTH, context)
    check_window(length, max(mine.vocab_size, theirs.vocab_size))
    read, other = (windows(one.tokenizer, text, length) for one in (found, reference))
    if mine.vocab_size != theirs.vocab_size or not np.array_equal(read.ids, other.ids):
        raise ConfigError(
            f"{found.name} and {reference.name} have other vocabularies, or read the text as other tokens",
            "two models of one tokenizer", "name another reference: --against MODEL",
        )  # fmt: skip
    of = f"kl, window {read.ids.shape[1]}, against {precision_of(reference)}"
    return about(found, of, digest((text, theirs.identity))), read


def _own_float(asked: EvalOptions) -> str | None:
    """The precision of a reference of the same checkpoint: its own numbers, or float32 where these are integers.

    raises ConfigError for an engine, which was built in one precision
    """
    _, folder = model_folder(asked.model, asked.env)
    if (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{asked.model} is built already, in one precision: there is no reference", "a checkpoint, or --against",
            "name the reference: --against MODEL",
        )  # fmt: skip
    own = Source.from_checkpoint(Checkpoint.open(folder)).own_precision
    quantised = own.default.coded or any(p.coded for _, p in own.patterns)
    return "fp32" if quantised else None


def _text(asked: EvalOptions) -> str:
    assert asked.data is not None, "the command has looked"
    return read_text(asked.data, "--data", _MOST_BYTES, "a text file, like WikiText's wiki.test.raw")


def _shown(found: Agreement) -> list[tuple[str, str]]:
    median, high, largest = found.at.values()
    return [
        ("mean KL", f"{with_error(found.divergence, '.6f')} nats a token"),
        ("its distribution", f"median {median:.6f}, 99 % below {high:.6f}, largest {largest:.6f}"),
        ("same likeliest", f"{with_error(_percent(found.same), '.2f')} % of tokens"),
        ("change of p", f"RMS {with_error(_percent(found.rms_change), '.3f')} points of the right token's, "
                        f"mean {with_error(_percent(found.change), '.3f')}"),
        ("perplexity", f"{with_error(found.perplexity)}, the reference's {with_error(found.reference_perplexity)}"),
        ("their ratio", with_error(found.ratio, ".5f")),
    ]  # fmt: skip


def _percent(mean: Mean) -> Mean:
    return mean.through(100 * mean.value, 100)


def _as_json(found: Agreement) -> dict[str, Any]:
    median, high, largest = found.at.values()
    return {
        "kl": {**as_json(found.divergence), "median": median, "99%": high, "largest": largest},
        "same_likeliest": as_json(found.same), "rms_change": as_json(found.rms_change),
        "mean_change": as_json(found.change), "perplexity": as_json(found.perplexity),
        "reference_perplexity": as_json(found.reference_perplexity), "ratio": as_json(found.ratio),
    }  # fmt: skip
