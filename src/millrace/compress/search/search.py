"""The whole way from a bound on the loss to a folder within it: formats tried, costs taken, mixes made and measured."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.settings import Progress
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.checkpoint.checkpoint_writer import put_in_place, staging_folder
from millrace.compress.compress import CompressionResult, compress
from millrace.compress.compression_plan import CompressionPlan, plan
from millrace.compress.measure import cost
from millrace.compress.measure.accuracy import Loss, Reference, loss_of
from millrace.compress.presets import CompressionTarget
from millrace.compress.recipe import to_dict
from millrace.compress.report.page import write_page
from millrace.compress.search.candidates import FLOAT, RoundedMatrixStore, bytes_of, recipe_of, shelf_bytes, survey
from millrace.compress.search.loss_bound import MOST_MIXES, LossBoundSearch, MaxLoss, candidates, compressed, searched
from millrace.compress.search.mixed_precision import Mix, frontier
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.text_windows import Windows

RECIPE = "recipe.json"  # in the folder: what to give to --recipe for the same again


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """rows: of a step whose time counts; 0 for bytes. isa, threads: on which it is timed"""

    bound: MaxLoss
    target: CompressionTarget
    rows: int
    isa: str
    threads: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Of one text: windows by which a mix is chosen, and others to prove it on; None where there are no more."""

    of: Calibration
    choice: Windows
    proof: Windows | None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """choice: the loss by which the mix was found; proof: of the same mix on windows that no mix was chosen by, None
    where the text has no more; floats: what the layers cost as they are, in the unit of costs"""

    goal: SearchGoal
    result: CompressionResult
    search: LossBoundSearch
    choice: Loss
    proof: Loss | None
    floats: float

    @property
    def loss(self) -> Loss:
        """What is to be said of the mix: what chose among mixes is in favour of the one that it chose."""
        return self.proof or self.choice

    @property
    def mix(self) -> Mix:
        return self.search.mixes[self.search.cheapest]


def search(
    job: CompressionPlan, goal: SearchGoal, statistics: CalibrationStatistics, texts: Texts, out: Path,
    progress: Progress,
    shelf: RoundedMatrixStore | None = None,
) -> SearchResult:  # fmt: skip
    """Writes the folder `out`, which must not exist, with the recipe that makes it again.

    job: says which layers there are; texts: that losses are measured on, others than that of the statistics
    shelf: where formats that were tried are kept; None: nowhere
    raises ConfigError where no mix is within the bound, and as `compress`
    """
    with staging_folder(out, "search") as work:
        shelf = shelf or RoundedMatrixStore(work / "formats")
        losses = survey(job, statistics, shelf, progress)
        costs = cost.seconds(job, goal.rows, goal.isa, goal.threads, progress) if goal.rows else cost.nbytes(job)
        mixes = compressed(frontier(candidates(losses, costs), MOST_MIXES), FLOAT)
        trials = _Trials(job, goal.bound, (shelf, work), Reference.of(job.checkpoint, texts.choice, progress), progress)
        result = searched(mixes, goal.bound, trials.measure)
        best_result, choice = trials.finished[result.cheapest]
        proof = _proven(job.checkpoint, best_result.folder, texts, progress)
        floats = sum(of[FLOAT] for of in costs.values())
        outcome = SearchResult(goal, replace(best_result, folder=out), result, choice.on(texts.of), proof, floats)
        _record(best_result.folder, outcome, statistics)
        put_in_place(best_result.folder, out)
    return outcome


def _proven(source: Checkpoint, folder: Path, texts: "Texts", progress: Progress) -> Loss | None:
    if texts.proof is None:
        return None
    return loss_of(Reference.of(source, texts.proof, progress), Checkpoint.open(folder), progress).on(texts.of)


def most_bytes(job: CompressionPlan) -> int:
    """That a search has on the disk at most: all matrices rounded, and two folders, as large as floats are."""
    layers = sum(max(bytes_of(job, layer, f) for f in (FLOAT, "int8")) for layer in job.layers)
    rest = job.bytes_after - sum(bytes_of(job, layer, "int8") for layer in job.layers)
    return shelf_bytes(job) + 2 * (layers + rest)


def _formats(mix: Mix) -> dict[str, str]:
    return {layer: candidate.format for layer, candidate in mix.chosen.items()}


@dataclass(slots=True)
class _Trials:
    """Mixes that are made and measured.

    places: the shelf, and where folders go; kept: of those within the bound the last, which is the cheapest so far
    """

    job: CompressionPlan
    bound: MaxLoss
    places: tuple[RoundedMatrixStore, Path]
    reference: Reference
    progress: Progress
    finished: dict[int, tuple[CompressionResult, Loss]] = field(default_factory=dict)
    n: int = 0

    def measure(self, number: int, mix: Mix) -> float:
        self.n += 1

        def report(what: str, done: int, total: int) -> None:
            self.progress(f"mix {self.n}: {what}", done, total)

        (shelf, work), formats = self.places, _formats(mix)
        job = plan(self.job.checkpoint, recipe_of(formats))
        compressed = compress(job, work / f"mix-{number}", shelf.method(formats), report)
        loss = loss_of(self.reference, Checkpoint.open(compressed.folder), report)
        result = self.bound.of(loss)
        if result > self.bound.bound:
            shutil.rmtree(compressed.folder)
            return result
        for older, _ in self.finished.values():
            shutil.rmtree(older.folder)
        self.finished = {number: (compressed, loss)}
        return result


def _record(folder: Path, result: SearchResult, statistics: CalibrationStatistics) -> None:
    """The recipe, and in what is recorded of the folder the search."""
    (folder / RECIPE).write_text(json.dumps(to_dict(result.result.job.recipe), indent=1) + "\n")
    write_page(folder, {**described(result), "loss": asdict(result.loss), "statistics": statistics.about.recorded})


def described(result: SearchResult) -> dict[str, Any]:
    """The search as JSON has it. Costs are bytes, or seconds of all layers' products; choice: the loss by which the mix
    was found, proven: what its bound is about, on other windows"""
    goal, search_ = result.goal, result.search
    timed = {"rows": goal.rows, "isa": goal.isa, "threads": goal.threads} if goal.rows else {}
    mixes: list[Mapping[str, object]] = [
        {"cost": mix.cost, "predicted": search_.predicted(i), "measured": search_.measured.get(i)}
        for i, mix in enumerate(search_.mixes)
    ]
    return {"search": {
        "loss": goal.bound.kind, "bound": goal.bound.bound, "target": str(goal.target), **timed,
        "unit": "s" if goal.rows else "bytes", "floats": result.floats, "found": search_.cheapest, "mixes": mixes,
        "choice": asdict(result.choice), "proven": None if result.proof is None else goal.bound.of(result.proof),
    }}  # fmt: skip
