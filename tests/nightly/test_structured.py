"""A real, small model is held to schemas: every one of a hundred answers is an object of its schema.

`max_tokens` covers the longest answer that a schema allows, so that none is cut: a character may be spelt as two
escapes of six. A number has no longest spelling (0.3333...) unless `multiple_of` and both its bounds give it one.
"""

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, Field

from millrace.compile.builder import build_engine
from millrace.compile.settings import BuildSettings
from millrace.tune.precision_selector import precision_selector
from tests.e2e.live import MODEL, Live, live
from tools.nightly.packages import smollm2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]
N = 100
AT_ONCE = 8  # an answer is the same in any batch, and a night is short
CHARACTER = 12  # the tokens of one, at most


class Ingredient(BaseModel):
    name: str = Field(max_length=16)
    grams: float = Field(ge=0, le=5000, multiple_of=0.1)


class Recipe(BaseModel):
    title: str = Field(max_length=30)
    course: Literal["starter", "main", "dessert"]
    minutes: int = Field(ge=1, le=600)
    vegetarian: bool
    ingredients: list[Ingredient] = Field(min_length=1, max_length=4)
    notes: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=3)] | None


class Address(BaseModel):
    street: str = Field(min_length=1, max_length=24)
    number: int = Field(ge=1, le=9999)
    country: Literal["DE", "FR", "日本"]


def with_a_year_of_python(date: str) -> str:
    """RFC 3339, which JSON Schema means, has a year 0; datetime has none."""
    return date.replace("0000-", "0001-", 1)


class Customer(BaseModel):
    name: str = Field(min_length=1, max_length=20)
    email: str = Field(pattern=r"^[a-z]{1,8}@[a-z]{1,8}\.(com|org)$")
    born: Annotated[datetime.date, BeforeValidator(with_a_year_of_python)]
    address: Address
    earlier: Address | None
    balance: int = Field(gt=-1000, lt=1000)


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: int = Field(ge=1, le=50)


class Label(BaseModel):
    kind: Literal["label"]
    text: str = Field(max_length=12)
    at: list[Annotated[int, Field(ge=0, le=99)]] = Field(min_length=2, max_length=2)


class Drawing(BaseModel):
    title: str = Field(max_length=16)
    shapes: list[Circle | Label] = Field(min_length=2, max_length=4)
    grid: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(min_length=3, max_length=3)]],
        Field(min_length=3, max_length=3),
    ]


# Each with what is asked, and the most characters of its strings; the rest of an answer is below 500 tokens.
SCHEMAS: dict[type[BaseModel], tuple[tuple[str, ...], int]] = {
    Recipe: (("a recipe for a soup", "a recipe with apples", "une recette de tarte", "what a penguin would eat"), 154),
    Customer: (("a customer from Paris", "somebody who is 90", "ein Kunde", 'a customer named "Bob"'), 100),
    Drawing: (("a drawing of a house", "two circles", "a map with 4 labels", "naughts and crosses"), 64),
}


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("smollm2") / "engine"
    build_engine(
        "smollm2",
        smollm2(),
        folder,
        BuildSettings(precision="auto", max_context=4096, tune=0),
        new_selector=precision_selector,
    )
    with live(folder) as server:
        yield server


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_smollm2_gives_an_object_a_hundred_times(smol: Live, schema: type[BaseModel]) -> None:
    subjects, n_characters = SCHEMAS[schema]

    def drawn(seed: int) -> BaseModel | None:
        asked: Any = [{"role": "user", "content": f"Write this as JSON: {subjects[seed % len(subjects)]}."}]
        answer = client.beta.chat.completions.parse(
            model=MODEL, messages=asked, response_format=schema, seed=seed, temperature=(0.3, 0.7, 1, 1.5)[seed // 25],
            max_tokens=CHARACTER * n_characters + 500,
        )  # fmt: skip
        return answer.choices[0].message.parsed

    with smol.client().with_options(timeout=600) as client, ThreadPoolExecutor(AT_ONCE) as threads:
        objects = list(threads.map(drawn, range(N)))
    assert len(objects) == N and all(isinstance(one, schema) for one in objects)
    assert len({str(one) for one in objects}) > N // 2, "seeds draw different answers"
