"""Numbers in prose are generated: the README, its picture and the page of performance are what the result files say."""

from benchmarks.page import PAGE, page
from benchmarks.readme import BEGIN, END, PICTURE, README, newest, picture, written
from benchmarks.runs import results

AGAIN = "run `python -m benchmarks.page` and `python -m benchmarks.readme`"


def test_the_readme_is_what_was_measured() -> None:
    readme = README.read_text()
    assert written(readme) == readme, AGAIN
    assert picture(newest()) == PICTURE.read_text(), AGAIN


def test_the_page_of_performance_is_what_was_measured() -> None:
    assert page() == PAGE.read_text(), AGAIN


def test_the_readme_is_short() -> None:
    before, generated = README.read_text().split(BEGIN)
    generated, after = generated.split(END)
    assert len((before + after).splitlines()) <= 110 and len(generated.splitlines()) <= 60


def test_what_is_published_is_from_trees_without_changes() -> None:
    """Files from before names had a time in them are as they were, and the page marks them."""
    dirty = [name for name, result in results() if "time" in result and result["commit"].endswith("+")]
    assert not dirty, f"{dirty}: commit first, then measure"
