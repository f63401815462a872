"""Numbers in prose are generated: the README's table is what the result files say."""

from pathlib import Path

from benchmarks.readme import written


def test_the_table_is_what_was_measured() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert written(readme) == readme, "run `python -m benchmarks.readme`"
