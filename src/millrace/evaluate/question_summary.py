"""Summaries of answered questions: correct answers in all and by group, with intervals, and comparisons as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.evaluate.paired_comparison import Paired, wilson
from millrace.evaluate.resumable_results import PER_BYTE, RIGHT, J, Results


def by_group(results: Results[J]) -> dict[str, list[J]]:
    """Return the answers by group (a subject of MMLU), in alphabetical order."""
    groups: dict[str, list[J]] = {}
    for (group, _), answer in results.records.items():
        groups.setdefault(group, []).append(answer)
    return dict(sorted(groups.items()))


def n_right(answers: Sequence[J], measure: str = RIGHT) -> int:
    return sum(answer.verdicts[measure].right for answer in answers)


def n_right_by_measure(results: Results[J]) -> dict[str, int]:
    answers = list(results.records.values())
    return {measure: n_right(answers, measure) for measure in answers[0].verdicts}


def n_cut(results: Results[J]) -> int:
    """Count the prompts that were longer than the context."""
    return sum(answer.cut for answer in results.records.values())


def n_gave_up(results: Results[J]) -> int:
    """Count the answers that a regular expression took too long to match."""
    return sum(answer.gave_up for answer in results.records.values())


def results_summary(results: Results[J]) -> dict[str, Any]:
    """Return JSON data."""
    n, counts = len(results.records), n_right_by_measure(results)
    measures = {
        name: {"right": right, "share": right / n, "interval": wilson(right, n)} for name, right in counts.items()
    }
    return {
        **results.about.summary(), "questions": n, **measures[RIGHT],
        **({"per_byte": measures[PER_BYTE]} if PER_BYTE in measures else {}), "cut": n_cut(results),
        "gave_up": n_gave_up(results),
        "subjects": {
            name: {"questions": len(answers), "right": n_right(answers)} for name, answers in by_group(results).items()
        },
    }  # fmt: skip


def comparison_summary(other: Results[J], comparison: Mapping[str, Paired]) -> dict[str, Any]:
    """Return JSON data of the comparison with another model's results. comparison: by measure"""
    measures = {
        name: {
            "difference": paired.difference, "interval": paired.interval, "p_value": paired.p_value,
            "gained": paired.gained, "lost": paired.lost, "changed": paired.changed,
        }
        for name, paired in comparison.items()
    }  # fmt: skip
    return {
        "model": other.about.model, "precision": other.about.precision, **measures[RIGHT],
        **({"per_byte": measures[PER_BYTE]} if PER_BYTE in measures else {}),
    }  # fmt: skip
