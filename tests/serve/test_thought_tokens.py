"""Tokens of thoughts in a response's usage: those of what its reader takes for a thought, however marks are written."""

import pytest

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser
from millrace.checkpoint.tool_calls.formats import Reasoning
from millrace.runtime.request.sampling_params import Delta, FinishReason
from millrace.serve.llm.output_parsing import OutputParser, ThoughtTokens
from tests.serve.support import tokenizer

# whether the prompt opened them; before them, they with their marks, behind them
ANSWERS: list[tuple[bool, str, str, str]] = [
    (False, "", "<think>a b</think>", "\n\nc </think>"),
    (False, " \n\t", "<think>\na < b</think>", "c"),
    (False, "\n", "<think></think>", "<think>c</think>"),
    (False, "\u3000", "<think>é</th</think>", "c"),
    (False, "", "<think>never closed", ""),
    (False, "a", "", "<think>b</think>"),
    (False, "<thin", "", " <think>b</think>"),
    (False, "  ", "", ""),
    (True, "", " a</think>", "b</think>"),
    (True, "", "<think>a</think>", "b"),
]


@pytest.mark.parametrize("opened, before, thought, behind", ANSWERS)
@pytest.mark.parametrize("spelled", [True, False])
def test_they_are_those_of_the_thought(opened: bool, before: str, thought: str, behind: str, spelled: bool) -> None:
    """spelled: the marks are letters, each a token; else `<think>` is one token, and its end is letters"""
    words = tokenizer()

    def ids(text: str) -> list[int]:
        parts = [*text] if spelled else [p for some in text.split("<think>") for p in ("<think>", *some)][1:]
        return [token for part in parts for token in words.encode(part, False)]

    assert len(words.encode("<think>", False)) == 1 and len(words.encode("</think>", False)) > 1
    answer, expected = ids(before) + ids(thought) + ids(behind), len(ids(thought))
    for cuts in ([], list(range(1, len(answer))), *([at] for at in range(1, len(answer)))):
        count = ThoughtTokens(Reasoning(), Detokenizer(words), opened)
        reader = OutputParser(AnswerParser(None, Reasoning(), thinks=opened), count)
        shown, thoughts = Detokenizer(words), ""
        for begin, until in zip([0, *cuts], [*cuts, len(answer)], strict=True):
            some = answer[begin:until]
            finish = FinishReason.LENGTH if until == len(answer) else None
            thoughts += reader.read(Delta(0, shown.push(some), tuple(some), finish_reason=finish)).reasoning
        inner = thought if opened else thought.removeprefix("<think>")
        assert thoughts == inner.partition("</think>")[0].strip(), cuts
        assert reader.n_thought == expected, cuts
