"""Instructor: objects out of answers, in its modes."""

import instructor
import openai
from pydantic import BaseModel, Field
from report import BASE, MODEL, check


class City(BaseModel):
    name: str = Field(max_length=20)  # or a small model goes on for ever


def asked(mode: instructor.Mode) -> City:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none"), mode=mode)
    hello = [{"role": "user", "content": "Name a city."}]
    return client.chat.completions.create(
        model=MODEL, messages=hello, response_model=City, max_tokens=64, max_retries=1, temperature=0
    )


@check("plain chat through its client")
def _() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none"), mode=instructor.Mode.MD_JSON)
    hello = [{"role": "user", "content": "Hello!"}]
    answer = client.chat.completions.create(model=MODEL, messages=hello, response_model=None, max_tokens=8)
    assert answer.choices[0].message.content


@check("tools")
def _() -> None:
    assert asked(instructor.Mode.TOOLS).name


@check("json_schema")
def _() -> None:
    assert asked(instructor.Mode.JSON_SCHEMA).name
