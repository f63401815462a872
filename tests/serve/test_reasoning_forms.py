"""What models think before an answer that has a form, or that must call a tool: it is free, and no part of either."""

import json
import re
from typing import Any

import pytest

from tests.serve.thinkers import (
    ALL,
    ASK,
    CALL,
    CALLED,
    CHAT,
    MESSAGES,
    OBJECT,
    OLLAMA,
    RESPONSES,
    STOPPED,
    TEXT,
    THOUGHT,
    Answer,
    Ask,
    Thinker,
    body,
    streamed,
    whole,
)


class TestThoughts:
    """In each protocol, whole or streamed."""

    def test_go_before_a_form(self, thinker: Thinker, path: str, ask: Ask) -> None:
        """They are free, and the content alone is the object: as the model writes it, or as it has to."""
        if path == MESSAGES:  # whose requests have no form
            return
        for tools, gap in ((False, ""), (True, ""), (False, "\n"), (False, "\n\n"), (True, "\n\n")):
            thinker.says(OBJECT, gap=gap)
            answer = ask(thinker, path, body(path, form=True, tools=tools))
            assert answer == Answer(THOUGHT, OBJECT, [], ["reasoning", "content"], STOPPED[path])
            assert thinker.executor.n_forced == 0, "nothing that it wanted to say was kept from it"
        thinker.says(OBJECT, gap="\n\n\n")
        answer = ask(thinker, path, body(path, form=True))
        assert thinker.executor.n_forced and answer.reasoning == THOUGHT, "no template writes more than an empty line"
        thinker.says(f"Sure: {OBJECT}")
        answer = ask(thinker, path, body(path, form=True))
        assert (answer.reasoning, answer.ended) == (THOUGHT, STOPPED[path]) and thinker.executor.n_forced
        held = json.loads(answer.content)
        assert set(held) == {"a"} and held["a"] in range(10)

    def test_go_before_a_call_that_must_be(self, thinker: Thinker, path: str, ask: Ask) -> None:
        if path == OLLAMA:  # whose requests have no tool_choice
            return
        for gap in ("", "\n\n"):
            thinker.says(CALL, gap=gap)
            answer = ask(thinker, path, body(path, tools=True, must=True))
            assert answer == Answer(THOUGHT, "", [("add", {"a": 5})], ["reasoning"], CALLED[path])
            assert thinker.executor.n_forced == 0
        thinker.says("I will not.")
        answer = ask(thinker, path, body(path, tools=True, must=True))
        assert (answer.reasoning, answer.content) == (THOUGHT, "")
        assert answer.calls and all(
            name == "add" and set(given) == {"a"} and given["a"] in range(10) for name, given in answer.calls
        )

    def test_are_over_where_the_prompt_has_closed_them(self, thinker: Thinker, path: str, ask: Ask) -> None:
        """As templates write it where none are wanted: then the form begins with the first token."""
        if path == MESSAGES:
            return
        plainly: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        others: dict[str, dict[str, Any]] = {OLLAMA: {"think": False}}
        thinker.executor.opened = "<think>\n\n</think>\n\n"
        for says, is_forced in ((OBJECT, False), (f"<think>\n{THOUGHT}\n</think>\n\n{OBJECT}", True)):
            thinker.executor.says = says
            answer = ask(thinker, path, {**body(path, form=True), **others.get(path, plainly)})
            assert (answer.reasoning, answer.ended) == ("", STOPPED[path]) and not answer.n_thought
            assert re.fullmatch(r'\{"a": \d\}', answer.content)
            assert (thinker.executor.n_forced > 0) == is_forced

    def test_a_form_or_a_call(self, thinker: Thinker, path: str, ask: Ask) -> None:
        if path == MESSAGES:
            return
        thinker.says(CALL, gap="")
        answer = ask(thinker, path, body(path, form=True, tools=True))
        assert answer == Answer(THOUGHT, "", [("add", {"a": 5})], ["reasoning"], CALLED[path])


@pytest.mark.parametrize("form", [False, True])
def test_a_thought_that_is_gone_on_with(thinker: Thinker, form: bool) -> None:
    """What the last message began is no part of the answer; what follows up to its end is thought."""
    answer = OBJECT if form else TEXT
    thinker.executor.says = f" a thought.</think>{answer}"
    for begun, thought, content in (
        ("<think>\nThis is", "a thought.", answer),
        ("<think>\nNo.</think>\n<think>This is", "a thought.", answer),
        *([] if form else [("<think>\nNo.</think>This is", "", f" a thought.</think>{TEXT}")]),
    ):
        thinker.executor.opened = begun
        for parts in (begun, [{"type": "text", "text": begun}]):
            asked = {**body(CHAT, form=form), "continue_final_message": True}
            asked["messages"] = [*ASK, {"role": "assistant", "content": parts}]
            found = streamed(thinker, CHAT, asked)
            assert thinker.executor.prompt.endswith(f"assistant\n{begun}")
            assert (found.reasoning.strip(), found.content.strip()) == (thought, content.strip())


def test_marks_that_are_no_tokens(speller: Thinker) -> None:
    """Thoughts are read all the same. An answer that is held to a form begins with it, and is no thought."""
    speller.says(TEXT)
    words, said = speller.executor.words, speller.executor.says
    until = [len(words.decode(words.encode(said, False)[:n])) for n in range(len(said))]
    n_thought = next(n for n, end in enumerate(until) if end >= said.index("</think>") + len("</think>"))
    for path in ALL:
        for ask in (whole, streamed):
            answer = ask(speller, path, body(path))
            assert (answer.reasoning, answer.content) == (THOUGHT, TEXT)
            assert answer.n_thought in (None, n_thought)
    speller.says(OBJECT)
    for path in (CHAT, RESPONSES, OLLAMA):
        answer = streamed(speller, path, body(path, form=True))
        assert answer.reasoning == "" and re.fullmatch(r'\{"a": \d\}', answer.content)
    for path in (CHAT, RESPONSES, MESSAGES):
        answer = streamed(speller, path, body(path, tools=True, must=True))
        assert answer.reasoning == answer.content == "" and answer.calls
