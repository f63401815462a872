"""Mixed-precision search: from a bound on the loss to a folder within it. Tries formats, then measures mixes."""

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
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure import cost
from millrace.compress.measure.accuracy import Loss, Reference, loss_of
from millrace.compress.presets import CompressionTarget
from millrace.compress.recipe import to_dict
from millrace.compress.report.page import write_page
from millrace.compress.search.candidates import FLOAT, RoundedMatrixStore, bytes_of, recipe_of, shelf_bytes, survey
from millrace.compress.search.loss_bound import MAX_MIXES, LossBoundSearch, MaxLoss, candidates, compressed, searched
from millrace.compress.search.mixed_precision import Mix, frontier
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.text_windows import Windows

RECIPE = "recipe.json"  # in the folder: the --recipe that reproduces it


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """What to minimize. rows: of the step to time; 0 to minimize bytes. isa, threads: to time with"""

    bound: MaxLoss
    target: CompressionTarget
    rows: int
    isa: str
    threads: int


@dataclass(frozen=True, slots=True)
class SearchWindows:
    """Windows of one text for choosing a mix, and held-out ones to verify it; None if there are no more."""

    calibration: Calibration
    choice: Windows
    proof: Windows | None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """choice: the mix's loss on the windows used to choose it; proof: its loss on held-out windows, if there are any.

    floats: cost of the uncompressed layers, in the unit of costs
    """

    goal: SearchGoal
    result: CompressionResult
    search: LossBoundSearch
    choice: Loss
    proof: Loss | None
    floats: float

    @property
    def loss(self) -> Loss:
        """Return the loss to report: the held-out one if possible, because choosing biases the other."""
        return self.proof or self.choice

    @property
    def mix(self) -> Mix:
        return self.search.mixes[self.search.cheapest]


def search(
    plan: CompressionPlan, goal: SearchGoal, statistics: CalibrationStatistics, texts: SearchWindows, out: Path,
    progress: Progress,
    store: RoundedMatrixStore | None = None,
) -> SearchResult:  # fmt: skip
    """Write the folder `out`, which must not exist, with the recipe that reproduces it.

    plan: determines the layers; texts: to measure losses on, different from the text of the statistics
    store: of rounded matrices; None: they are not kept
    raises ConfigError if no mix is within the bound, and as `compress`
    """
    with staging_folder(out, "search") as work:
        store = store or RoundedMatrixStore(work / "formats")
        losses = survey(plan, statistics, store, progress)
        costs = cost.seconds(plan, goal.rows, goal.isa, goal.threads, progress) if goal.rows else cost.nbytes(plan)
        mixes = compressed(frontier(candidates(losses, costs), MAX_MIXES), FLOAT)
        trials = _Trials(
            plan,
            goal.bound,
            (store, work),
            Reference.from_checkpoint(plan.checkpoint, texts.choice, progress),
            progress,
        )
        result = searched(mixes, goal.bound, trials.measure)
        best_result, choice = trials.finished[result.cheapest]
        proof = _proven(plan.checkpoint, best_result.folder, texts, progress)
        floats = sum(cost_of_layer[FLOAT] for cost_of_layer in costs.values())
        outcome = SearchResult(
            goal, replace(best_result, folder=out), result, choice.on(texts.calibration), proof, floats
        )
        _record(best_result.folder, outcome, statistics)
        put_in_place(best_result.folder, out)
    return outcome


def _proven(source: Checkpoint, folder: Path, texts: "SearchWindows", progress: Progress) -> Loss | None:
    if texts.proof is None:
        return None
    reference = Reference.from_checkpoint(source, texts.proof, progress)
    return loss_of(reference, Checkpoint.open(folder), progress).on(texts.calibration)


def max_bytes(plan: CompressionPlan) -> int:
    """Estimate peak disk space of a search: all rounded matrices, and two folders as large as with floats."""
    layers = sum(max(bytes_of(plan, layer, f) for f in (FLOAT, "int8")) for layer in plan.layers)
    rest = plan.bytes_after - sum(bytes_of(plan, layer, "int8") for layer in plan.layers)
    return shelf_bytes(plan) + 2 * (layers + rest)


def _formats(mix: Mix) -> dict[str, str]:
    return {layer: candidate.format for layer, candidate in mix.chosen.items()}


@dataclass(slots=True)
class _Trials:
    """Writes and measures mixes.

    places: the store and the parent of folders; kept: the last mix within the bound, the cheapest so far
    """

    plan: CompressionPlan
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

        (store, work), formats = self.places, _formats(mix)
        plan = plan_compression(self.plan.checkpoint, recipe_of(formats))
        compressed = compress(plan, work / f"mix-{number}", store.method(formats), report)
        loss = loss_of(self.reference, Checkpoint.open(compressed.folder), report)
        result = self.bound.loss_value(loss)
        if result > self.bound.bound:
            shutil.rmtree(compressed.folder)
            return result
        for older, _ in self.finished.values():
            shutil.rmtree(older.folder)
        self.finished = {number: (compressed, loss)}
        return result


def _record(folder: Path, result: SearchResult, statistics: CalibrationStatistics) -> None:
    """Write the recipe, and add the search to the folder's record."""
    (folder / RECIPE).write_text(json.dumps(to_dict(result.result.plan.recipe), indent=1) + "\n")
    write_page(folder, {**described(result), "loss": asdict(result.loss), "statistics": statistics.about.recorded})


def described(result: SearchResult) -> dict[str, Any]:
    """Return the search for the record.

    Costs are bytes, or seconds of all layers' matmuls; choice: the loss on the windows used to choose the mix;
    proven: on held-out windows
    """
    goal, search_ = result.goal, result.search
    timed = {"rows": goal.rows, "isa": goal.isa, "threads": goal.threads} if goal.rows else {}
    mixes: list[Mapping[str, object]] = [
        {"cost": mix.cost, "predicted": search_.predicted(i), "measured": search_.measured.get(i)}
        for i, mix in enumerate(search_.mixes)
    ]
    return {"search": {
        "loss": goal.bound.kind, "bound": goal.bound.bound, "target": str(goal.target), **timed,
        "unit": "s" if goal.rows else "bytes", "floats": result.floats, "found": search_.cheapest, "mixes": mixes,
        "choice": asdict(result.choice),
        "proven": None if result.proof is None else goal.bound.loss_value(result.proof),
    }}  # fmt: skip
