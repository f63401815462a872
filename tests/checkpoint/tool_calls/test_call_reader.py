"""Answers with calls of tools and thoughts, as each family writes them: read whole, and however they are cut."""

import json
import random
from dataclasses import dataclass

import pytest

from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, ParsedDelta, joined
from millrace.checkpoint.tool_calls.families import (
    DEEPSEEK,
    DEEPSEEK_PLAIN,
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    Reasoning,
    ToolFormat,
)  # fmt: skip

TOOLS = ("get_current_weather", "get_weather", "add")
WEATHER = '{"city": "Dallas", "state": "TX", "unit": "fahrenheit"}'


@dataclass
class Parts:
    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def read(format: ToolFormat | None, pieces: list[str], **options: object) -> Parts:
    thoughts = options.pop("thoughts", None)
    reader = AnswerParser(format, thoughts, tools=TOOLS, **options)  # type: ignore[arg-type]
    said = ParsedDelta()
    for piece in [*pieces, None]:
        more = reader.flush() if piece is None else reader.push(piece)
        assert more.spans is not None and all(begin >= said.n_settled for begin, _ in more.spans)
        said = joined(said, more)
    assert "".join("".join(pieces)[begin:end] for begin, end in said.spans or ()) == said.content
    calls: list[tuple[str, str]] = []
    for part in said.calls:
        if part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, ""))
        name, arguments = calls[part.index]
        calls[part.index] = name, arguments + part.arguments
    assert reader.n_calls >= len(calls)
    return Parts(said.content, said.reasoning, calls)


# The makers' examples: model cards and prompt formats of Meta, Nous and Qwen, Mistral and DeepSeek.
EXAMPLES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (
        HERMES,
        f'<tool_call>\n{{"name": "get_current_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "", [("get_current_weather", WEATHER)],
    ),
    (
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"b": "}]\\"{"}, "name": "add"}\n</tool_call>',
        "Let me look.", [("add", '{"a": 1}'), ("add", '{"b": "}]\\"{"}')],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}</tool_call> Done.', " Done.", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "unheard_of"}', "", [("unheard_of", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (GENERIC, '<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": 2}]}}', "", [("add", '{"a": [1, {"b": 2}]}')]),
    (LLAMA, f'{{"name": "get_current_weather", "parameters": {WEATHER}}}', "", [("get_current_weather", WEATHER)]),
    (LLAMA, f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    (
        LLAMA, '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
        "", [("add", '{"a": 1}'), ("add", '{"a": 2}')],
    ),
    (LLAMA, 'It is {"name": "add", "parameters": {}}', 'It is {"name": "add", "parameters": {}}', []),
    (LLAMA, ' {"name": "Bob", "parameters": {}}', ' {"name": "Bob", "parameters": {}}', []),
    (LLAMA, '{"a": 1}', '{"a": 1}', []),
    (
        MISTRAL, f'[TOOL_CALLS] [{{"name": "get_current_weather", "arguments": {WEATHER}}}]',
        "", [("get_current_weather", WEATHER)],
    ),
    (
        MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5}}, {"name": "add", "arguments":{"a": 4}}]',
        "", [("add", '{"a": 3.5}'), ("add", '{"a": 4}')],
    ),
    (MISTRAL, '[TOOL_CALLS]{"name": "add", "arguments": {"a": 7}}', "", [("add", '{"a": 7}')]),
    (
        MISTRAL_ARGS, f"[TOOL_CALLS]get_current_weather[ARGS]{WEATHER}[TOOL_CALLS]add[ARGS]{{}}",
        "", [("get_current_weather", WEATHER), ("add", "{}")],
    ),
    (MISTRAL_ARGS, 'Sure.[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', "Sure.", [("add", '{"a": 1}')]),
    (MISTRAL_ARGS, '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}')]),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{WEATHER}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "", [("get_weather", WEATHER), ("add", "{}")],
    ),
    (
        DEEPSEEK_PLAIN,
        "I'll check the weather.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"location":"Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "I'll check the weather.", [("get_weather", '{"location":"Paris"}')],
    ),
]  # fmt: skip
IDS = [f"{format.name}-{i}" for i, (format, *_) in enumerate(EXAMPLES)]


@pytest.mark.parametrize("format, text, content, calls", EXAMPLES, ids=IDS)
def test_the_families_examples(format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(format, [text]) == Parts(content, "", calls)


# Text that only begins like a call stays text, to the letter.
BROKEN = [
    (HERMES, "<tool_call>"), (HERMES, "a <tool_call> \n"), (HERMES, "<tool_call>nothing</tool_call>"),
    (HERMES, "<tool_call>\n{'name': 'add'}\n</tool_call>"), (HERMES, '<tool_call>{"nam'), (HERMES, "<tool_"),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'), (HERMES, '<tool_call>{"name" "add"}'),
    (HERMES, '<tool_call>{"arguments": 3, "name": "add"}'), (HERMES, "  \n "), (HERMES, "<tool_call>{}"),
    (LLAMA, "{"), (LLAMA, ' {"name": "ad'), (LLAMA, "  "), (LLAMA, '{"name": "addd", "parameters": {"a": 1}} ?'),
    (MISTRAL, "[TOOL_CALLS] ["), (MISTRAL, "[TOOL_C"), (MISTRAL_ARGS, "[TOOL_CALLS]add a and b"),
    (DEEPSEEK, "<｜tool▁calls▁begin｜>x"), (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"),
]  # fmt: skip


@pytest.mark.parametrize("format, text", BROKEN)
def test_what_is_no_call_is_text(format: ToolFormat, text: str) -> None:
    assert read(format, [text]) == Parts(text, "", [])


THOUGHTS = [
    ("<think>\nso\n\nit is\n</think>\n\nHi.", False, "Hi.", "so\n\nit is"),
    ("so it is</think>Hi.", True, "Hi.", "so it is"),
    ("so it </thin is", True, "", "so it </thin is"),
    ("<think></think>Hi", False, "Hi", ""),
    (" <thinking", False, " <thinking", ""),
    ("<think>\n\n</think>\n\n", False, "", ""),
    ("Hi <think>no</think>", False, "Hi <think>no</think>", ""),
]


@pytest.mark.parametrize("text, thinks, content, reasoning", THOUGHTS)
def test_thoughts_go_before_an_answer(text: str, thinks: bool, content: str, reasoning: str) -> None:
    assert read(None, [text], thoughts=Reasoning(), thinks=thinks) == Parts(content, reasoning, [])


def test_without_a_format_nothing_is_held_back() -> None:
    reader = AnswerParser(None, None)
    for piece in (" ", "<tool_call>", '{"name": "add"} ', "\n"):
        assert reader.push(piece) == ParsedDelta(piece)
    assert reader.flush() == ParsedDelta()


ALL = [(f, t, False) for f, t, *_ in EXAMPLES] + [(f, t, False) for f, t in BROKEN]
ALL += [(HERMES, f'{t}<tool_call>{{"name": "add", "arguments": {{"a": 1}}}}', thinks) for t, thinks, *_ in THOUGHTS]


@pytest.mark.parametrize("format, text, thinks", ALL)
def test_cuts_change_nothing(format: ToolFormat, text: str, thinks: bool) -> None:
    whole = read(format, [text], thoughts=Reasoning(), thinks=thinks)
    rng = random.Random(text)
    ways = [list(text), *([text[:at], text[at:]] for at in range(len(text)))]
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 9))))
        ways.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for pieces in ways:
        assert "".join(pieces) == text
        assert read(format, pieces, thoughts=Reasoning(), thinks=thinks) == whole, pieces


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 20))])
def test_random_text_is_lost_nowhere(seed: int) -> None:
    """Of pieces of marks and JSON in any order: cuts change nothing, and without a call nothing is left out."""
    rng = random.Random(seed)
    words = ['<tool_call>', '</tool_call>', '{"name": "add"', ', "arguments": {', '"a": "x"', "}", "}", "\n", " and ",
             "[TOOL_CALLS]", "[", "]", "[ARGS]", "add", '"', "\\", "<think>", "</think>", "<|python_tag|>"]  # fmt: skip
    for _ in range(150):
        text = "".join(rng.choices(words, k=rng.randint(1, 14)))
        for format in (HERMES, LLAMA, MISTRAL, DEEPSEEK):
            whole = read(format, [text])
            assert read(format, list(text)) == whole, text
            if not whole.calls:
                assert whole.content == text


def test_arguments_come_as_they_are_written() -> None:
    """Not when the call is complete."""
    reader = AnswerParser(HERMES, None, tools=TOOLS)
    given = [
        reader.push(piece) for piece in ('<tool_call>{"name": "add", "arguments": {"a": ', "12", '3, "b', '": 1}}')
    ]
    assert [[(part.name, part.arguments) for part in said.calls] for said in given] == [
        [("add", '{"a": ')], [(None, "12")], [(None, '3, "b')], [(None, '": 1}')],
    ]  # fmt: skip


def test_calls_beyond_those_that_are_wanted_are_left_out() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 3 + "!"
    assert read(HERMES, [text], max_calls=1) == Parts("!", "", [("add", '{"a": 1}')])
    assert read(HERMES, list(text), max_calls=2).calls == [("add", '{"a": 1}')] * 2


@pytest.mark.parametrize("format", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_PLAIN])
def test_what_the_formats_write_is_read(format: ToolFormat) -> None:
    """The same data serve the prompt, the grammar and the reader."""
    calls = [("add", json.dumps({"a": '"}{['})), ("get_weather", "{}"), ("add", '{"a": [{}]}')]
    assert read(format, [format.syntax.calls(calls)]) == Parts("", "", calls)


def test_a_call_that_is_cut_off_has_what_came() -> None:
    """Behind its name: its arguments as far as they were written, and no text."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    begun = text.index('"add"') + len('"add"')
    for cut in range(begun, len(text)):
        parts = read(HERMES, [text[:cut]])
        assert parts.content == "" and [name for name, _ in parts.calls] == ["add"]
        assert '{"a": 1}'.startswith(parts.calls[0][1])
