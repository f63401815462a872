"""Extras: each is named where its feature is described, with the commands for a checkout and for a wheel."""

import re
import tomllib
from pathlib import Path

from tests.docs.test_commands import HISTORY, PAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEVELOPERS = {"dev", "peers"}
WHEEL, CHECKOUT = re.compile(r"millrace\[([\w,]+)\]"), re.compile(r"'\.\[([\w,]+)\]'")


def names(pattern: re.Pattern[str], text: str) -> set[str]:
    return {name for found in pattern.findall(text) for name in found.split(",")}


def pages() -> dict[str, str]:
    named = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    return {name: text for name, text in named.items() if not any(part in name for part in HISTORY)}


def test_structured_output_needs_no_extra() -> None:
    assert any(one.startswith("llguidance") for one in PROJECT["dependencies"])
    assert EXTRAS["grammar"] == [], "an alias, so that older commands install without a warning"
    assert not [name for name, text in pages().items() if "grammar" in names(WHEEL, text) | names(CHECKOUT, text)]


def test_all_has_every_extra_of_a_feature() -> None:
    (everything,) = EXTRAS["all"]
    assert names(WHEEL, everything) == set(EXTRAS) - DEVELOPERS - {"all", "grammar"}


def test_a_page_that_names_an_extra_says_how_to_install_it_in_both_ways() -> None:
    found: set[str] = set()
    for name, text in pages().items():
        assert names(WHEEL, text) | names(CHECKOUT, text) <= set(EXTRAS), name
        assert names(WHEEL, text) == names(CHECKOUT, text) or name == "README.md", name
        found |= names(WHEEL, text)
    assert found >= {"grpc", "gpu", "otel", "png", "onnxruntime", "pytorch"}


def test_the_table_has_every_extra() -> None:
    table = (ROOT / "docs" / "installation.md").read_text()
    assert set(EXTRAS) - DEVELOPERS <= set(re.findall(r"`(\w+)`", table))


def test_extras_that_errors_name_exist() -> None:
    found: set[str] = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        found |= names(WHEEL, re.sub(r"millrace\[\{extra\}\]", "", Path(path).read_text()))
    assert {"grpc", "gpu", "otel", "png"} <= found <= set(EXTRAS) | {"EXTRA"}
