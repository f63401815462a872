"""A real, small model is held to a schema: every one of a hundred answers is an object of it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from millrace.compile.builder import build_engine
from millrace.compile.settings import BuildSettings
from millrace.tune.pricing import pricing
from tests.e2e.live import MODEL, live
from tools.nightly.packages import smollm2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]
N = 100


class Ingredient(BaseModel):
    name: str = Field(max_length=16)
    grams: float = Field(ge=0, le=5000)


class Recipe(BaseModel):
    title: str = Field(max_length=30)
    course: Literal["starter", "main", "dessert"]
    minutes: int = Field(ge=1, le=600)
    vegetarian: bool
    ingredients: list[Ingredient] = Field(min_length=1, max_length=4)
    notes: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=3)] | None


def test_smollm2_gives_an_object_a_hundred_times(tmp_path: Path) -> None:
    settings = BuildSettings(precision="auto", max_context=1024, tune=0)
    build_engine("smollm2", smollm2(), tmp_path / "engine", settings, pricing=pricing)
    dishes = ["a soup", "something with apples", "a quick dinner", "une tarte", "what a penguin would eat"]
    with live(tmp_path / "engine") as server, server.client() as client:
        for seed in range(N):
            asked: Any = [{"role": "user", "content": f"Write a recipe for {dishes[seed % len(dishes)]}, as JSON."}]
            answer = client.beta.chat.completions.parse(
                model=MODEL, messages=asked, response_format=Recipe, seed=seed, temperature=1, max_tokens=900
            )
            assert isinstance(answer.choices[0].message.parsed, Recipe), f"seed {seed}: {answer}"
