"""Precision of a whole model: the accuracy loss of candidates, and the cheapest one within a bound.

Candidates are tried in a fixed order by bytes and matmul cost, never by timing, so the choice is the same on every
machine. Each evaluates the calibration text layer group by layer group with the kernels that its engine would run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from millrace.compile.build import BuildOptions, plan_pieces, resolve_options
from millrace.compile.lower_cpu.program import Bounds, Program
from millrace.compile.precision import PrecisionMap, StoredMatrix
from millrace.compile.precision_selection import AccuracyQuery
from millrace.engine.artifact.accuracy_loss import AccuracyLoss, Evaluation, rounded
from millrace.engine.cache_specs import KV_FORMATS, KvFormat
from millrace.engine.io_slots import slot
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.divergence import DivergenceScore
from millrace.evaluate.piecewise_forward import Answers, ReadText, answers, read, score
from millrace.evaluate.sizes import SHORTEST
from millrace.evaluate.text_windows import Windows
from millrace.graph.rewrite import LOGITS
from millrace.kernels.precision import Precision, with_groups
from millrace.model.families import HEAD

# By bytes per weight; ties: 8-bit activations first, because they are faster.
# Without W4A16: the rounding to four bits dominates the loss (docs/precision.md).
ORDER = (Precision.W4A8, Precision.W8A8, Precision.W8A16, Precision.BF16, Precision.FP32)
_WIDER = {Precision.W4A8: Precision.W4A16, Precision.W8A8: Precision.W8A16}  # same weights, 16-bit activations
_ROWS = 64  # of logits per step
_REFERENCE = BuildOptions(precision=PrecisionMap(Precision.FP32), kv_format=KvFormat.F32)


@dataclass(frozen=True, slots=True)
class AccuracySelector:
    """The selector described in compile/precision_selection.py."""

    calibration: Calibration

    @property
    def digest(self) -> str:
        return self.calibration.digest

    def candidates(self, own: PrecisionMap) -> tuple[PrecisionMap, ...]:
        """Return `ORDER` up to the checkpoint's own type; for quantised checkpoints the stored codes, then wider
        ones."""
        if own.default.quantised and not own.stored_groups:
            return tuple(_plain(p, own) for p in ORDER)
        if own.default.coded:
            wider = tuple((pattern, _WIDER.get(p, p)) for pattern, p in own.patterns)
            stored = (own, replace(own, default=_WIDER.get(own.default, own.default), patterns=wider))
            return (*dict.fromkeys(stored), *(_plain(p, own) for p in (Precision.BF16, Precision.FP32)))
        return (*(_plain(p, own) for p in ORDER[: ORDER.index(own.default)]), own)

    def select(self, query: AccuracyQuery) -> tuple[PrecisionMap, Evaluation]:
        context = query.source.max_context
        if context < SHORTEST and query.max_kl is None:
            return query.candidates[0], Evaluation(f"a context of {context} tokens is too short for it")
        text = self.calibration.windows(query.tokenizer, context)
        search, tried = _CandidateSearch(query, text), list[AccuracyLoss]()
        with answers(search.reference, search.vocab_size) as exact:
            for candidate in query.candidates:
                tried.append(search.measure(candidate, exact))
                if query.max_kl is None or tried[-1].within(query.max_kl):
                    return candidate, Evaluation(
                        not_measured="", text=self.calibration.kind, digest=self.digest, tokens=text.n_scored,
                        window=int(text.ids.shape[1]), max_kl=query.max_kl, tried=tried,
                    )  # fmt: skip
        raise _none_within(tried, query.max_kl or 0)


class _CandidateSearch:
    """Evaluates candidates one after another against a single evaluation of the reference."""

    def __init__(self, query: AccuracyQuery, text: Windows) -> None:
        self._query, self._text, self._done = query, text, 0
        exact = self._pieces(replace(query.options, precision=_REFERENCE.precision, kv_format=_REFERENCE.kv_format))
        logits = slot(exact[-1].outputs, LOGITS)
        assert logits is not None and isinstance(logits.shape[1], int), "a language model"
        self.vocab_size = logits.shape[1]
        self._total = (1 + len(query.candidates)) * len(exact)
        self.reference = self._read(exact, "fp32, the reference")

    def measure(self, candidate: PrecisionMap, exact: Answers) -> AccuracyLoss:
        """Return the loss of a candidate. Unrepresentable scales count as an infinite loss if there is a bound on KL;
        otherwise they raise CheckpointError"""
        options = replace(self._query.options, precision=candidate)
        chosen = resolve_options(self._query.source, options)
        name = label(candidate, chosen.kv_format, chosen.by_tiles, self._query.source.stored)
        pieces = self._pieces(options)
        if self._is_reference(options):
            return AccuracyLoss(name, 0.0, 1.0, 1.0, sum(p.matrix_bytes for p in pieces))
        try:
            reading = self._read(pieces, name)
            with answers(reading, self.vocab_size) as rough, np.errstate(all="ignore"):  # non-finite: no loss
                return rounded_loss(name, score(exact, rough, self._text), reading.matrix_bytes)
        except CheckpointError:  # the reference read the same weights, so the checkpoint itself is valid
            if self._query.max_kl is None:
                raise
            return AccuracyLoss(name, None, None, 0.0, sum(p.matrix_bytes for p in pieces))

    def _is_reference(self, options: BuildOptions) -> bool:
        one, other = (resolve_options(self._query.source, candidate) for candidate in (options, _REFERENCE))
        return (one.precision.meaning, one.kv_format) == (other.precision.meaning, other.kv_format)

    def _pieces(self, options: BuildOptions) -> tuple[Program, ...]:
        """Plan programs with one window per step; the split into steps does not change results."""
        length = int(self._text.ids.shape[1])
        step = replace(options, max_batch=1, max_step_tokens=length, profile={"R": Bounds(1, _ROWS, _ROWS)})
        return tuple(plan_pieces(self._query.source, step))

    def _read(self, pieces: Sequence[Program], name: str) -> ReadText:
        def advance() -> None:
            self._done += 1
            self._query.progress(f"measuring {name}, piece by piece", self._done, self._total)

        self._query.progress(f"measuring {name}, piece by piece", self._done, self._total)
        reading = read(pieces, self._text, self.vocab_size, advance)
        self._done += 1
        return reading


def rounded_loss(name: str, result: DivergenceScore, weights_bytes: int) -> AccuracyLoss:
    """Return the loss as it is stored, rounded to significant digits."""
    return AccuracyLoss(
        name, rounded(result.mean_kl), rounded(result.ratio), rounded(result.agreement) or 0.0, weights_bytes
    )  # fmt: skip


def label(
    precision: PrecisionMap, kv: KvFormat, by_tiles: bool, stored: Mapping[str, StoredMatrix] = MappingProxyType({})
) -> str:
    """Format a precision: "w4a8 g32, lm_head w8a8, int8 keys and values". stored: the checkpoint's matrix formats"""
    by_pattern = {pattern: p for pattern, p in precision.described(HEAD).items() if pattern != "default"}
    head = [f"{HEAD} {by_pattern.pop(HEAD)}"] if HEAD in by_pattern else []
    patterns = [f"{pattern} {p}" for pattern, p in by_pattern.items()]
    if len(patterns) > 3:  # a GGUF may name dozens of layers
        patterns = [f"{len(patterns)} layers otherwise"]
    groups = ("as stored" if _keeps(precision, stored) else f"g{precision.group}") if precision.meaning.group else ""
    classes = with_groups([f"{precision.default}", *head, *patterns], groups)
    kv_text = [f"{KV_FORMATS[kv].name} keys and values"] if KV_FORMATS[kv].numbers else []
    sums = ["bf16 summed by tiles"] if by_tiles else []
    return ", ".join([*classes, *kv_text, *sums])


def _keeps(precision: PrecisionMap, stored: Mapping[str, StoredMatrix]) -> bool:
    """Whether all quantised matrices are used as stored in the checkpoint, without requantisation."""
    classes = ((precision.precision_of(name, is_head=name == HEAD), matrix.codes) for name, matrix in stored.items())
    return precision.stored_groups and all(precision.stored_format(codes, one) for one, codes in classes if one.coded)


def _plain(precision: Precision, own: PrecisionMap) -> PrecisionMap:
    return PrecisionMap(precision, group=own.group, head=own.head, stored_groups=own.stored_groups)


def _none_within(tried: Sequence[AccuracyLoss], bound: float) -> ConfigError:
    """Create the error if no candidate meets the bound; it names the best one."""
    finite = [p for p in tried if p.kl is not None]
    if not finite:
        return ConfigError(
            "--precision auto found no precision whose answers are finite", "weights that give finite logits",
            "check the checkpoint",
        )  # fmt: skip
    best = min(finite, key=lambda p: p.kl or 0)
    exact = "" if any(p.kl == 0 for p in finite) else "; fp32 is what the others are measured against"
    return ConfigError(
        f"no precision keeps within --max-kl {bound:g}: the best is {best.name} with KL {best.kl:.3g}",
        f"a bound of at least {best.kl:.3g} nats a token",
        f"raise --max-kl, or name a --precision, which is obeyed{exact}",
    )  # fmt: skip
