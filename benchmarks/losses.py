"""docs/compress.md's loss tables, from the newest run of each model: `python -m benchmarks.losses`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks import scores
from benchmarks.compression import about, losses, told
from benchmarks.runs import Result, label, of_kind
from benchmarks.tables import table

DOCUMENT = Path(__file__).parents[1] / "docs" / "compress.md"
BEGIN, END = "<!-- losses: written by python -m benchmarks.losses -->", "<!-- end of losses -->"


def newest(kind: str) -> dict[str, Result]:
    """The last run of each model."""
    return {result["model"]: result for _, result in of_kind(kind)}


def tables() -> Iterator[str]:
    answered = newest("scores")
    for model, result in newest("compression").items():
        yield f"**{result['model']}**, {about(result)}; {label(result)}."
        yield table(*losses(result))
        yield "\n".join(f"- {told(goal)}" for goal in result["goals"])
        if model in answered:
            yield f"Right answers of {model}: {scores.about(answered[model])}; {label(answered[model])}."
            yield table(*scores.scores(answered[model]))


def written(document: str) -> str:
    """With the tables of the newest runs between its marks."""
    before, rest = document.split(BEGIN)
    inside = "\n\n".join(tables())
    return f"{before}{BEGIN}\n{inside}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
