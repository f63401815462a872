"""Pages: what a browser may do with them, and that nothing that comes in is more than text."""

import base64
import hashlib
import re
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from millrace.report.page import is_millrace_page, render
from millrace.report.plot_scale import Scale, byte_ticks

BODY = """{% extends "page.html" %}
{% block title %}{{ name }}{% endblock %}
{% block body %}<p title="{{ name }}">{{ name }}</p>{% endblock %}"""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "own.html"
    path.write_text(BODY)
    return path


def test_the_policy_allows_the_one_style_and_nothing_else(template: Path) -> None:
    page = render(template, name="x")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    allowed = dict(part.split(" ", 1) for part in unescape(policy).split("; "))
    assert allowed == {
        "default-src": "'none'", "style-src": f"'sha256-{digest}'", "base-uri": "'none'", "form-action": "'none'"
    }  # fmt: skip
    assert page.index("Content-Security-Policy") < page.index("<style>"), "a policy holds for what comes after it"
    assert "prefers-color-scheme: dark" in style and "<script" not in page and "http" not in style


def test_what_comes_in_is_text(template: Path) -> None:
    hostile = """"><script>alert('1')</script>{{ 7 * 7 }}&lt;"""
    page = render(template, name=hostile)
    assert "<script" not in page and "49" not in page and page.count("&#34;&gt;&lt;script&gt;alert(&#39;1&#39;)") == 3


def test_a_forgotten_value_is_noticed(template: Path) -> None:
    with pytest.raises(UndefinedError, match="name"):
        render(template)


def test_pages_of_ours_are_known(template: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(template, name="x"))
    assert is_millrace_page(page)
    for other in ("", "<!doctype html><title>millrace</title>", " " * 2000 + page.read_text()):
        page.write_text(other)
        assert not is_millrace_page(page)


@pytest.mark.parametrize("most", [1, 5, 6, 1000, 1023, 1024, 1025, 3 << 20, 2461696, 1 << 40])
def test_ticks_are_few_and_round(most: int) -> None:
    ticks = byte_ticks(most)
    steps = {b - a for a, b in pairwise(ticks)}
    assert ticks[0] == 0 and ticks[-1] <= most and 2 <= len(ticks) <= 6
    assert len(steps) == 1 and steps.pop().bit_count() == 1


def test_a_scale_runs_either_way_and_may_be_empty() -> None:
    assert [Scale(0, 10, 100, 0).at(v) for v in (0, 5, 10)] == [100, 50, 0] and Scale(3, 3, 7, 9).at(3) == 7
