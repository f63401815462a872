"""What compressing costs in answers: rounding to nearest and every method, in one run, on one text.

    python -m benchmarks.compression --model SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt --kept FOLDER
    python -m benchmarks.compression --model tiny

Statistics are of 128 samples of 512 tokens of the text's first half, answers are judged on windows spread over its last
two fifths, beside the source in float32. `tiny` reads documents of its generator instead: some that it may have been
trained on, then held-out ones. Each recipe becomes a folder, as `millrace compress` makes it, and is measured in the
engine that the folder gives. All recipes are judged on the same windows, and none of these was looked at when methods
were chosen: shares of one another's KL have an interval over windows in pairs, and a goal within it is not decided.

What was measured is in --kept, and a run that was ended goes on with it; of another commit, model or text it is
measured anew. Writes results/compression-MODEL-TIME-COMMIT.json; docs/compress.md has its table: benchmarks.losses.
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.record import commit, count, judged_surely, provenance, write_result
from millrace.bench.analysis.intervals import student_t
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions
from millrace.compile.precision import PrecisionMap
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics
from millrace.compress.calibration.calibration_pass import collect, samples
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.compress import by_rounding, compress
from millrace.compress.compression_plan import plan_compression
from millrace.compress.measure.accuracy import Reference
from millrace.compress.measure.cost import nbytes
from millrace.compress.presets import SAMPLES
from millrace.compress.recipe import PRESETS, Recipe
from millrace.compress.search.candidates import RoundedMatrixStore, recipe_of, survey
from millrace.compress.search.loss_bound import candidates
from millrace.compress.search.mixed_precision import mixed
from millrace.evaluate.divergence import DivergenceScore
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_windows import Windows, windows_of
from millrace.kernels.precision import Precision

WINDOWS = 12  # that are judged on
MIX_BITS = 4.5
TINY_LENGTH, TINY_SAMPLES, TINY_WINDOWS = 192, 96, 512
# What methods were chosen by is judged on no more: of a text so many windows, of the generator documents from 0 on.
_SEEN, _UNSEEN = (8, 12), 200_000
RTN, GPTQ_CLIP, MIX = "int4-wo", "int4-gptq-clip", f"mix of {MIX_BITS} bits"
# The two whose goals are judged, whichever others lose less: AWQ moves scales and clips ranges as the paper and AutoAWQ
# have it (docs/compress.md names what differs), llm-compressor's GPTQ takes whole ranges. GPTQ within clipped ranges is
# our own, found by looking.
AWQ, GPTQ = "int4-awq", "int4-gptq"
_INT4 = PRESETS[RTN].usual
_BEST4 = PRESETS[GPTQ_CLIP].usual
RECIPES: dict[str, Recipe] = {
    name: PRESETS.get(name) or Recipe(name, treatment)
    for name, treatment in {
        "int8-wo": PRESETS["int8-wo"].usual, "int8-sq": PRESETS["int8-sq"].usual, "fp8": PRESETS["fp8"].usual,
        "fp8-tensor": PRESETS["fp8-tensor"].usual, "fp8-gptq": PRESETS["fp8-gptq"].usual,
        RTN: _INT4, "int4-wo-mse": PRESETS["int4-wo-mse"].usual,
        "rtn, searched by energy": replace(_INT4, search="imatrix"), "rtn, clipped": replace(_INT4, search="clip"),
        "awq, not clipped": replace(_INT4, smooth="awq"), AWQ: PRESETS[AWQ].usual, GPTQ: PRESETS[GPTQ].usual,
        "w4afp8-awq": PRESETS["w4afp8-awq"].usual,
        GPTQ_CLIP: _BEST4, "awq, then gptq, clipped": replace(_BEST4, smooth="awq"),
        "rtn, groups of 32": replace(_INT4, group=32), "rtn, by row": replace(_INT4, group=0),
        "gptq, clipped, groups of 32": replace(_BEST4, group=32), "gptq, clipped, by row": replace(_BEST4, group=0),
    }.items()
}  # fmt: skip
Say = Callable[[str], None]
SIMULATED = ", FP8 activations"  # of a recipe's second line
_GOALS = 6  # of a run that is kept as a result: all that there are
_STAND_INS = {"KL of fp8-gptq": "fp8"}  # methods that were judged by a goal of another


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one recipe. kl, perplexity, ratio (of perplexities), agreement: each with the standard error of its mean over
    windows, which are what is independent; seconds: of making the folder, statistics at hand
    kl_by_window: in the order of the windows, the same for all recipes; none in files from before they were kept
    """

    recipe: str
    about: str
    precision: str
    bits: float
    kl: tuple[float, float]
    perplexity: tuple[float, float]
    ratio: tuple[float, float]
    agreement: tuple[float, float]
    seconds: float
    kl_by_window: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, about: str, precision: str, bits: float, score: DivergenceScore, seconds: float) -> "Cost":
        def over_windows(values: Sequence[float]) -> tuple[float, float]:
            return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))

        def exp(mean: tuple[float, float]) -> tuple[float, float]:
            return math.exp(mean[0]), math.exp(mean[0]) * mean[1]

        parts = score.parts
        kl = [float(p.divergence.mean()) for p in parts]
        return cls(
            name, about, precision, round(bits, 3), over_windows(kl),
            exp(over_windows([p.loss.mean() for p in parts])),
            exp(over_windows([(p.loss - p.reference_loss).mean() for p in parts])),
            over_windows([p.same.mean() for p in parts]), round(seconds, 1), tuple(float(f"{one:.6g}") for one in kl),
        )  # fmt: skip


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class SearchWindows(NamedTuple):
    calibration: Windows
    judged: Windows
    about: str

    @property
    def digest(self) -> str:
        return _digest(self.calibration.ids.tobytes() + self.judged.ids.tobytes())


def of_a_text(checkpoint: Checkpoint, file: Path, n: int, windows: int) -> SearchWindows:
    text = file.read_text(encoding="utf-8")
    ids = checkpoint.tokenizer.encode(text[3 * len(text) // 5 :])
    every = windows_of(checkpoint.tokenizer, ids, LENGTH)
    seen = {ids.tobytes() for n in _SEEN for ids in every.spread(n).ids}
    unseen = [ids for ids in every.ids if ids.tobytes() not in seen]
    if len(unseen) < windows:
        raise SystemExit(f"{file} has {len(unseen)} windows to judge on, {windows} are asked for: give a longer text")
    held_out = replace(every, ids=np.stack(unseen)).spread(windows)
    about = f"{n} samples of {LENGTH} tokens of the first half of {file.name}; judged on its last two fifths"
    return SearchWindows(samples(checkpoint.tokenizer, text[: len(text) // 2], n), held_out, about)


def of_the_world(checkpoint: Checkpoint) -> SearchWindows:
    """`tiny`'s: documents one behind the other, cut where a window is full."""
    from tools.tiny.world import BOS, document, held_out_exam

    def cut(texts: Sequence[str], n: int) -> Windows:
        ids = [token for text in texts for token in checkpoint.tokenizer.encode(text)]
        return windows_of(checkpoint.tokenizer, ids[: n * TINY_LENGTH], TINY_LENGTH)

    trained = ["".join(piece.text for piece in document(seed)).removeprefix(BOS) for seed in range(4 * TINY_SAMPLES)]
    exams = [held_out_exam(_UNSEEN + seed) for seed in range(4 * TINY_WINDOWS)]
    held_out = [f"{e.prompt.removeprefix(BOS)} {e.choice.letter}" for e in exams]
    about = f"{TINY_SAMPLES} samples of {TINY_LENGTH} tokens of its generator; judged on documents that it held out"
    return SearchWindows(cut(trained, TINY_SAMPLES), cut(held_out, TINY_WINDOWS), about)


@dataclass(frozen=True, slots=True)
class Bench:
    """kept: results and statistics of earlier runs"""

    checkpoint: Checkpoint
    texts: SearchWindows
    kept: Path
    say: Say

    def run(self, names: Sequence[str]) -> list[Cost]:
        self.say("statistics")
        started_s = time.perf_counter()
        source = Source.from_checkpoint(self.checkpoint)
        statistics = collect(source, self.texts.calibration, self._statistics)
        self.say(f"statistics: {time.perf_counter() - started_s:.0f} s")
        reference = Reference.from_checkpoint(self.checkpoint, self.texts.judged)
        found = []
        for name in names:
            for cost in self._kept(name) or self._measured(name, reference, statistics):
                found.append(cost)
                kl = f"KL {cost.kl[0]:.4f} ± {cost.kl[1]:.4f}"
                self.say(f"{cost.recipe:28} {cost.bits:6.3f} bits  {kl}  {cost.seconds:.0f} s")
        return found

    @property
    def _statistics(self) -> Path:
        return self.kept / f"statistics-{_digest(self.texts.calibration.ids.tobytes())}"

    def _measured(self, name: str, reference: Reference, statistics: CalibrationStatistics) -> list[Cost]:
        """As it runs here and, where the folder means FP8 activations, as it would run with these."""
        simulated = None
        if name == "bf16":
            options = BuildOptions(precision=PrecisionMap(Precision.BF16))
            cost = Cost.of(
                name, "nothing compressed", name, 16.0, reference.compare_with(reference.source, options), 0.0
            )
        else:
            started_s = time.perf_counter()
            recipe = (
                mix(self.checkpoint, statistics, RoundedMatrixStore.next_to(self._statistics))
                if name == MIX
                else RECIPES[name]
            )
            job = plan_compression(self.checkpoint, recipe)
            with tempfile.TemporaryDirectory(dir=self.kept) as folder:
                compress(job, Path(folder) / "out", by_statistics(statistics) if job.calibrated else by_rounding)
                seconds = time.perf_counter() - started_s
                made = Source.from_checkpoint(Checkpoint.open(Path(folder) / "out"))
                score = reference.compare_with(made, BuildOptions())
                simulated = reference.with_fp8(made, BuildOptions())
            precision = str(made.own_precision.default)
            cost = Cost.of(name, recipe.about, precision, job.bits_per_weight, score, seconds)
        costs = [cost]
        if simulated is not None:
            costs.append(Cost.of(f"{name}{SIMULATED}", "", "simulated", cost.bits, simulated, cost.seconds))
        self._file(name).write_text(json.dumps([asdict(one) for one in costs]))
        return costs

    def _file(self, name: str) -> Path:
        key = f"{commit()} {self.texts.digest} {self.checkpoint.identity()} {name}"
        return self.kept / f"cost-{_digest(key.encode())}.json"

    def _kept(self, name: str) -> list[Cost] | None:
        file = self._file(name)
        if not file.is_file():
            return None
        return msgspec.json.decode(file.read_bytes(), type=list[Cost])


def mix(
    checkpoint: Checkpoint, statistics: CalibrationStatistics, shelf: RoundedMatrixStore, bits: float = MIX_BITS
) -> Recipe:
    """The knapsack of `millrace compress --max-loss`: of all its formats, what loses least by statistics within so many
    bits a weight, scales included."""
    job = plan_compression(checkpoint, Recipe("four", _BEST4))
    layers = candidates(survey(job, statistics, shelf, lambda *_: None), nbytes(job))
    chosen = {layer: one.format for layer, one in mixed(layers, bits / 8 * job.n_weights, "bytes").items()}
    formats = Counter(chosen.values()).most_common()
    return replace(recipe_of(chosen, MIX), about=", ".join(f"{n} layers {format}" for format, n in formats))


Values = Sequence[float] | NDArray[np.float64]  # of windows
Interval = tuple[float, float, float]  # a figure, and the ends of its 95 %


def mean_of(values: Values) -> Interval:
    """Over windows, by Student's t."""
    half = student_t(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean, mean - half, mean + half


def share_of(part: Values, whole: Values) -> Interval:
    """Of two means over the same windows, their ratio r; its error is that of the mean of part - r * whole, in shares
    of the whole (Cochran, Sampling Techniques, 6.3): what makes a window hard for both is in neither's favour."""
    a, b = np.asarray(part), np.asarray(whole)
    ratio = float(a.sum() / b.sum())
    _, low, high = mean_of(a - ratio * b)
    return ratio, ratio + low / float(b.mean()), ratio + high / float(b.mean())


def goals(costs: Mapping[str, Cost]) -> list[dict[str, Any]]:
    """Of what was measured, those that it can judge."""
    found, of_rtn = [], ", of the KL of rounding to nearest"

    def share(name: str) -> Interval:
        return share_of(costs[name].kl_by_window, costs[RTN].kl_by_window)

    if {RTN, AWQ, GPTQ} <= costs.keys():
        better, other = sorted([AWQ, GPTQ], key=lambda name: costs[name].kl[0])
        what = f"the better of AWQ and GPTQ, {better}{of_rtn}"
        found = [
            judged_surely(what, share(better), 0.65), judged_surely(f"{what}, hoped for", share(better), 0.5),
            judged_surely(f"the other of them, {other}{of_rtn}", share(other), 0.8),
        ]  # fmt: skip
    if {RTN, MIX} <= costs.keys():
        found.append(judged_surely(f"the {MIX}{of_rtn}", share(MIX), 0.4))
    single = (name for name in ("int8-sq", "fp8") if name in costs)
    return found + [judged_surely(f"KL of {name}", mean_of(costs[name].kl_by_window), 0.01) for name in single]


def verdict(goal: Mapping[str, Any]) -> str:
    """Return the verdict of a result file, unless another method stands in for the one that the goal names."""
    named = _STAND_INS.get(goal["what"])
    met = goal["verdict"] in ("met", "goal met")
    return f"missed: the goal names {named}" if named and met else str(goal["verdict"])


def about(result: Mapping[str, Any]) -> str:
    return f"{result['text']}: {result['windows']} windows, {result['tokens']:,} predictions"


def losses(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): each recipe beside the source in float32; intervals of 95 %, of means over windows."""
    t = student_t(result["windows"] - 1)
    header = ["recipe", "runs in", "bits a weight", "KL, nats", "perplexity", "loss of it", "same token", "made in"]
    base = next((cost for cost in result["costs"] if cost["recipe"] == RTN), None)
    rows = []
    for cost in result["costs"]:
        kl, error = cost["kl"]
        share = _share(cost, base) if base and cost["bits"] < 5 and cost["recipe"] != RTN else ""
        ratio, off = cost["ratio"]
        low, high = ratio - t * off - 1, ratio + t * off - 1
        rows.append([
            cost["recipe"] + (f": {cost['about']}" if cost["about"] and cost["recipe"] not in PRESETS else ""),
            cost["precision"], f"{cost['bits']:.2f}", f"{kl:.4f} ± {t * error:.4f}{share}",
            f"{cost['perplexity'][0]:.2f}", f"{ratio - 1:+.2%} ({low:+.2%} to {high:+.2%})",
            f"{cost['agreement'][0]:.1%}", f"{cost['seconds']:.0f} s",
        ])  # fmt: skip
    return header, rows


def told(goal: Mapping[str, Any]) -> str:
    """With its interval; of files from before these were kept without."""
    of = "" if "interval" not in goal else " ({} to {})".format(*goal["interval"])
    return f"{goal['what']}: {goal['reached']}{of}, asked: at most {goal['goal']}: {verdict(goal)}"


def _share(cost: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    if not cost.get("kl_by_window"):
        return f", {cost['kl'][0] / base['kl'][0]:.0%} of {RTN}'s"
    ratio, low, high = share_of(cost["kl_by_window"], base["kl_by_window"])
    return f", {ratio:.0%} of {RTN}'s ({low:.0%} to {high:.0%})"


def run(args: argparse.Namespace) -> dict[str, Any]:
    checkpoint = Checkpoint.open(BUNDLED / "tiny" if args.model == "tiny" else Path(args.model))
    texts = (
        of_the_world(checkpoint) if args.text is None else of_a_text(checkpoint, args.text, args.samples, args.windows)
    )
    args.kept.mkdir(parents=True, exist_ok=True)
    costs = Bench(checkpoint, texts, args.kept, lambda text: print(text, flush=True)).run(args.recipes)
    return {
        **provenance("benchmarks.compression"), "model": checkpoint.folder.stem, "text": texts.about,
        "windows": len(texts.judged.ids), "tokens": texts.judged.n_scored, "costs": [asdict(cost) for cost in costs],
        "goals": goals({cost.recipe: cost for cost in costs}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = ["bf16", *RECIPES, MIX]
    parser.add_argument("--model", default="tiny", help='"tiny", or a checkpoint with --text (default: %(default)s)')
    parser.add_argument("--text", type=Path, help="a text in UTF-8")
    parser.add_argument("--samples", type=count, default=SAMPLES, help="of statistics (default: %(default)s)")
    parser.add_argument("--windows", type=count, default=WINDOWS, help="that are judged on (default: %(default)s)")
    parser.add_argument(
        "--recipes", nargs="+", choices=every, default=every, metavar="NAME",
        help="default: all; with fewer a result file is written where they decide all goals",
    )  # fmt: skip
    parser.add_argument("--kept", type=Path, help="folder of what was measured before; default: one that is gone after")
    args = parser.parse_args()
    if (args.model == "tiny") != (args.text is None):
        parser.error("--text goes with a --model of your own")
    if args.windows < 2:
        parser.error("--windows: at least 2, for an error")
    with tempfile.TemporaryDirectory() as temporary:
        args.kept = args.kept or Path(temporary)
        result = run(args)
    for goal in result["goals"]:
        print(told(goal))
    if len(result["goals"]) == _GOALS:
        print(write_result(f"compression-{result['model']}", result))


if __name__ == "__main__":
    main()
