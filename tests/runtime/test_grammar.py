"""Grammars: what may come next, against plain counting; what cannot be held to is refused; answers in any company."""

import random
import re
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.api.offline_generate import generate
from millrace.errors import RequestError
from millrace.kernels.sample.ref import unpacked
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output import grammar, grammar_limits
from millrace.runtime.structured_output.grammar import GrammarCompiler, Matcher, ReasoningSpan
from tests.runtime.fakes import EOS, VOCAB, FakeTokenizer, limits, make_loop
from tests.serve.support import VOCABULARY, tokenizer

PIECES = FakeTokenizer().pieces
WORDS = [
    "a",
    "ab",
    "abc",
    "ad",
    "b",
    "bad cab",
    "cab",
    "cage",
    "dead",
    "deaf",
    "a bed",
    "bed",
    "egg\n",
    "é",
    "éa",
    "界",
]


@pytest.fixture(scope="module")
def fake() -> GrammarCompiler:
    """Of a small vocabulary; tests that change nothing share its compiling process."""
    return GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])


def allowed(grammars: GrammarCompiler, matcher: Matcher) -> set[int]:
    return {int(i) for i in np.flatnonzero(unpacked(grammars.masks([matcher])[0], VOCAB))}


@pytest.mark.parametrize("seed", range(25))
def test_a_mask_allows_what_leads_to_a_choice(seed: int, fake: GrammarCompiler) -> None:
    rng = random.Random(seed)
    choices = [word.encode() for word in rng.sample(WORDS, rng.randint(1, 6))]
    asked = StructuredOutputsParams(choice=[c.decode() for c in choices])
    (matcher,), said = fake.matchers(asked, 1), b""
    while True:
        left = [c.removeprefix(said) for c in choices if c.startswith(said)]
        expected = {i for i, p in enumerate(PIECES) if i != EOS and any(rest.startswith(p) for rest in left)}
        expected |= {EOS} if b"" in left else set()
        got = allowed(fake, matcher)
        assert got == expected
        token = rng.choice(sorted(got))
        if token == EOS:
            break
        said += PIECES[token]
        matcher.accept(token)
    assert said in choices and not matcher.error


def test_when_it_is_complete_only_the_end_is_allowed() -> None:
    grammars = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS, 5])
    (matcher,) = grammars.matchers(StructuredOutputsParams(regex="a"), 1)
    matcher.accept(1)
    assert EOS in allowed(grammars, matcher) <= {EOS, 5} and not matcher.error


def test_masks_of_several_rows_are_those_of_each(fake: GrammarCompiler) -> None:
    matchers = [fake.matchers(StructuredOutputsParams(regex=r), 1)[0] for r in ("[a-c]+", "b", "(h|g)a", "[ab]{2}")]
    together = fake.masks(matchers)
    assert [together[i].tolist() for i in range(4)] == [fake.masks([m])[0].tolist() for m in matchers]


def test_masks_that_are_filled_beside_are_those_filled_before() -> None:
    """While another thread holds on to them the step has to wait; what is asked for next is filled behind it."""
    grammars = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])
    matchers = [grammars.matchers(StructuredOutputsParams(regex=r), 1)[0] for r in ("[a-c]+", "b", "(h|g)a", "[ab]{2}")]
    begin, fill = threading.Event(), grammars._fill

    def late(masks: NDArray[np.uint32], of: Sequence[Matcher]) -> None:
        assert begin.wait(10)
        fill(masks, of)

    with patch.object(grammars, "_fill", late):
        masks, ready = grammars.masks_in_background(matchers)
        assert not ready[0] and not masks.any()
        begin.set()
        grammars._filling.result(10)
    assert ready[0] and masks.tolist() == grammars.masks(matchers).tolist()


def test_masks_that_cannot_be_filled_allow_nothing_and_say_so() -> None:
    grammars = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])
    matchers = grammars.matchers(StructuredOutputsParams(regex="[a-c]+"), 2)
    with patch.object(grammars, "_compute", side_effect=MemoryError("no more")):
        masks, ready = grammars.masks_in_background(matchers)
        with pytest.raises(MemoryError):
            grammars._filling.result(10)
    assert ready[0] and not masks.any()
    with pytest.raises(MemoryError, match="no more"):
        grammars.masks_in_background(matchers)


def test_a_token_that_does_not_follow_leaves_nothing_allowed(fake: GrammarCompiler) -> None:
    held, other = fake.matchers(StructuredOutputsParams(regex="ab"), 2)
    held.accept(8)
    masks = fake.masks([held, other])
    assert held.error and not masks[0].any() and masks[1].any() and not other.error


NEVER: dict[str, Any] = {"type": "string", "minLength": 5, "maxLength": 2}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}, "not"),
    ({"json": {"type": "object", "propertyNames": {"pattern": "a"}}}, "propertyNames"),
    ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
    ({"json": {"$ref": "https://example.com/schema.json"}}, "json cannot be enforced"),
    ({"json": {"type": "text"}}, "json cannot be enforced"),
    ({"json": NEVER}, "json cannot be enforced"),
    ({"regex": "(a"}, 'enforced: invalid regex "(a" (in regex): regex parse error: unclosed group'),
    ({"regex": "a(?=b)"}, "look-ahead and look-behind, is not supported"),
    ({"regex": "b" * 5000 + "(a"}, "unclosed group"),
    ({"json": {"type": "string", "pattern": r"(a)\1"}}, "backreferences are not supported"),
    ({"regex": "[^\\s\\S]"}, "regex cannot be enforced"),
    ({"grammar": "start: nothing"}, "grammar cannot be enforced"),
    ({"grammar": 'start: "a" ('}, "grammar cannot be enforced"),
    ({"grammar": "start: x\nx[temperature=2]: /a*/"}, "a rule with a temperature"),
    ({"grammar": 'start: x\n  x [ stop="," , capture, max_tokens=3,\n temperature = 0.5]: /a*/'}, "with a temperature"),
    ({"grammar": "start: x\n" + "x[a=1," * 20_000}, "grammar cannot be enforced"),
    ({"grammar": "start: x\nx" + "[" + "\t" * 120_000}, "grammar cannot be enforced"),
]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    eos = tokenizer().eos_token_id
    assert eos is not None
    return GrammarCompiler(tokenizer(), VOCABULARY, [eos])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("given, says", BAD, ids=[str(given)[:60] for given, _ in BAD])
def test_what_cannot_be_held_to_is_refused_by_name(grammars: GrammarCompiler, given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as error:
        grammars.matchers(StructuredOutputsParams(**given, field_name="guided_json"), 1)
    assert error.value.param == "guided_json" and "\n" not in error.value.what and "start:" not in error.value.what
    assert len(error.value.what) < 500


def test_a_temperature_that_is_text_is_none_of_a_rule(grammars: GrammarCompiler) -> None:
    lines = [
        'start: x ["temperature="] [y]',
        "// x[temperature=2]",
        'x[stop="[temperature=2]"]: /[a-c]{1,9}/',
        'y: "[temperature=3]"',
    ]
    lark = "\n".join(lines)
    (matcher,) = grammars.matchers(StructuredOutputsParams(grammar=lark), 1)
    assert not matcher.error


@pytest.mark.parametrize("limit", ["LEXER_FUEL", "LEXER_STATES", "GRAMMAR_SIZE"])
def test_what_explodes_ends_at_a_limit(limit: str, fake: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower one: llguidance builds no automaton beforehand, so that little reaches the limits we have."""
    asked = StructuredOutputsParams(grammar="start: A B\nA: /(.*a.{300}.*b.{300}){2}/\nB: /[a-z]{2,9}/")
    fake.matchers(asked, 1)
    monkeypatch.setattr(grammar_limits, limit, 2)
    with pytest.raises(RequestError, match="its grammar cannot be enforced: ") as error:
        GrammarCompiler(FakeTokenizer(), VOCAB, [EOS]).matchers(asked, 1)
    assert len(error.value.what) < 400


def test_a_vocabulary_that_cannot_spell_it_is_refused(fake: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="no token of the vocabulary"):
        fake.matchers(StructuredOutputsParams(json_object=True), 1)


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError, match="no end-of-text token"):
        GrammarCompiler(FakeTokenizer(), VOCAB, []).matchers(StructuredOutputsParams(regex="a"), 1)


def test_what_was_compiled_is_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = GrammarCompiler._compiled

    def counted(self: GrammarCompiler, source: str) -> Any:
        compiled.append(source)
        return compile_one(self, source)

    monkeypatch.setattr(GrammarCompiler, "_compiled", counted)
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    known = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])
    for regex in ("a", "b", "a", "c", "a", "b"):  # c takes the place of b, and b that of c
        known.matchers(StructuredOutputsParams(regex=regex), 1)
    assert [source.split("/")[1] for source in compiled] == ["a", "b", "c", "b"] and len(known._cache) == 2


def test_what_is_kept_is_bounded_by_its_length(monkeypatch: pytest.MonkeyPatch, fake: GrammarCompiler) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_CHARACTERS", 1000)
    for letter in "abcde":
        fake.matchers(StructuredOutputsParams(regex=letter * 300), 1)
    assert len(fake._cache) == 2
    fake.matchers(StructuredOutputsParams(regex="f" * 2000), 1)
    assert len(fake._cache) == 1, "the last one is kept, however long it is"


def test_several_threads_compile_at_once() -> None:
    known, failed = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS]), list[BaseException]()

    def work(seed: int) -> None:
        try:
            for i in range(20):
                (matcher,) = known.matchers(StructuredOutputsParams(regex=f"[a-d]{{{1 + (seed + i) % 7}}}"), 1)
                matcher.accept(1)
                assert allowed(known, matcher)
        except (AssertionError, RequestError, RuntimeError) as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


HELD = SamplingParams(n=3, seed=3, temperature=1, structured_outputs=StructuredOutputsParams(choice=WORDS[:11]))


def test_answers_are_the_same_in_any_company() -> None:
    """Alone, in a batch of others, and where pages are so few that sequences lose theirs and are computed again."""
    held = [HELD, SamplingParams(seed=8, max_tokens=12, structured_outputs={"regex": "([a-h]{2} )+[a-h]"})]  # type: ignore[arg-type]
    prompts = [[1 + i, 2, 3, 4 + i, 5] for i in range(8)]
    params = [held[i % 2] if i % 4 < 3 else SamplingParams(seed=i, max_tokens=20) for i in range(8)]
    alone = [generate(make_loop(), [p], q)[0].outputs for p, q in zip(prompts, params, strict=True)]
    for of in (limits(), limits(max_sequences=3, n_pages=8, max_context=32)):
        together = generate(make_loop(of), prompts, params)
        assert [output.outputs for output in together] == alone
    for outputs, asked in zip(alone, params, strict=True):
        if asked is HELD:
            assert all(o.text in WORDS[:11] and o.finish_reason is FinishReason.STOP for o in outputs)
            assert all(o.token_ids[-1] == EOS for o in outputs)


def test_max_tokens_may_cut_an_answer() -> None:
    asked = SamplingParams(max_tokens=3, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-h]{9}"))
    (output,) = generate(make_loop(), [[1, 2]], asked)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[a-h]{3,6}", output.outputs[0].text)


def test_p12_an_answer_that_cannot_go_on_fails_alone() -> None:
    loop, got = make_loop(), dict[str, list[Delta]]()
    plain = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)
    assert HELD.structured_outputs is not None
    matchers = loop.grammars.matchers(HELD.structured_outputs, HELD.n)
    matchers[1].accept(8)  # what does not follow
    loop.submit([1, 2], HELD, got.setdefault("held", []).extend, matchers=matchers)
    loop.submit([3, 4], plain, got.setdefault("plain", []).extend)
    while loop.step():
        pass
    failed = [delta for delta in got["held"] if delta.finish_reason is FinishReason.ERROR]
    assert failed and all("cannot be enforced any more" in (delta.error or "") for delta in failed)
    assert all(delta.fault and delta.fault.param == "structured_outputs" for delta in failed)
    assert got["plain"][-1].finish_reason is FinishReason.LENGTH and not loop.thread.dead_because
    assert all(delta.fault is None for delta in got["plain"])


EXPLODES = "(a|b)*a(a|b){100}"  # where an `a` was among the last 101 letters: as many states as there are texts


def followed(grammars: GrammarCompiler, matcher: Matcher, text: str) -> list[set[int]]:
    """What may come next, along a text."""
    masks = []
    for letter in text:
        masks.append(allowed(grammars, matcher))
        matcher.accept(PIECES.index(letter.encode()))
    return [*masks, allowed(grammars, matcher)]


@pytest.mark.parametrize("spends", ["states", "work in one mask"])
def test_an_answer_that_gives_up_spoils_no_other(spends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of those that run, which began before, nor of those to come; what is compiled anew is kept again."""
    compiled: list[str] = []
    compile_one = GrammarCompiler._compiled

    def counted(self: GrammarCompiler, source: str) -> Any:
        compiled.append(source)
        return compile_one(self, source)

    if spends == "states":
        monkeypatch.setattr(grammar_limits, "LEXER_STATES", 1000)
    else:
        monkeypatch.setattr(grammar_limits, "STEP_FUEL", 1000)
    monkeypatch.setattr(GrammarCompiler, "_compiled", counted)
    rng, asked = random.Random(1), StructuredOutputsParams(regex=EXPLODES)
    long, short = ("".join(rng.choice("ab") for _ in range(n)) for n in (600, 8))
    alone = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])
    expected = followed(alone, alone.matchers(asked, 1)[0], short + "b")
    assert EOS not in expected[-1] != set()
    grammars = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])
    (greedy,), siblings, (idle,) = grammars.matchers(asked, 1), grammars.matchers(asked, 2), grammars.matchers(asked, 1)
    assert [followed(grammars, other, short) for other in siblings] == [expected[:-1]] * 2
    followed(grammars, greedy, long)
    assert "lexer error" in greedy.error
    assert len(compiled) == 3, "for both, and once more for the one that gave up"
    for matcher in siblings:
        matcher.accept(2)
    masks = grammars.masks([*siblings, greedy])
    assert [{int(i) for i in np.flatnonzero(unpacked(mask, VOCAB))} for mask in masks] == [expected[-1]] * 2 + [set()]
    assert followed(grammars, idle, short + "b") == expected and len(compiled) == 5, "once for each request"
    for _ in range(2):
        assert followed(grammars, grammars.matchers(asked, 1)[0], short + "b") == expected
    assert len(compiled) == 6 and greedy.error and not any(m.error for m in (*siblings, idle))


def test_p12_a_form_that_gives_up_fails_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same form come and go beside it; they answer as each does alone."""
    monkeypatch.setattr(grammar_limits, "LEXER_STATES", 150)
    asked = StructuredOutputsParams(regex=EXPLODES)
    long, short = (SamplingParams(max_tokens=n, seed=4, temperature=1, structured_outputs=asked) for n in (110, 12))
    (alone,) = generate(make_loop(), [[1, 2]], short)[0].outputs
    loop, got = make_loop(), list[list[Delta]]()

    def submit(prompt: list[int], params: SamplingParams) -> None:
        got.append([])
        loop.submit(prompt, params, got[-1].extend, matchers=loop.grammars.matchers(asked, 1))

    submit([3, 4], long)
    while not any(delta.finish_reason for delta in got[0]):
        loop.step()
        if len(got) == 1 or any(delta.finish_reason for delta in got[-1]):
            submit([1, 2], short)
    submit([1, 2], short)
    while loop.step():
        pass
    fault = got[0][-1].fault
    assert fault and "lexer error" in fault.what and len(set(alone.token_ids)) > 2
    assert [[token for delta in deltas for token in delta.token_ids] for deltas in got[1:]] == (
        [list(alone.token_ids)] * (len(got) - 1)
    )


NEWLINE, TWO = 10, 90  # as if both were white space


def test_white_space_behind_a_thought_comes_before_the_form(fake: GrammarCompiler) -> None:
    thoughts = ReasoningSpan(6, 7, False, {NEWLINE: 1, TWO: 2}, 2)
    ways: list[tuple[list[int], set[int]]] = [
        ([], {6}), ([6, 7], {NEWLINE, TWO}), ([6, 7, NEWLINE], {NEWLINE}), ([6, 7, NEWLINE, NEWLINE], set()),
        ([6, 7, TWO], set()), ([6, 7, 2], set()), ([2], set()),
    ]  # fmt: skip
    for tokens, more in ways:
        (matcher,) = fake.matchers(StructuredOutputsParams(regex="b[ab]*"), 1, thoughts)
        for token in tokens:
            matcher.accept(token)
        begun = tokens[-1:] == [2]
        form = {i for i, p in enumerate(PIECES) if i and re.fullmatch(b"[ab]+" if begun else b"b[ab]*", p)}
        assert allowed(fake, matcher) == form | more | ({EOS} if begun else set()), tokens


def test_white_space_that_a_form_begins_with_is_the_forms(fake: GrammarCompiler) -> None:
    (matcher,) = fake.matchers(StructuredOutputsParams(regex="\n?a"), 1, ReasoningSpan(6, 7, True, {NEWLINE: 1}, 2))
    for token in (7, NEWLINE):
        matcher.accept(token)
    assert allowed(fake, matcher) == {1} and not matcher.error
