"""The checker reads every sentence of the generator, and knows a true answer from a false or foreign one."""

import random

import pytest

from tools.tiny.forms import ANSWERED, ASKED, CHECKED, TOLD
from tools.tiny.grammar import agrees, claim, fill, holds, parse, parse_story, vocabulary
from tools.tiny.items import ask_some, check, lasting_facts, sums
from tools.tiny.stories import make_story
from tools.tiny.world import held_out_question


@pytest.mark.parametrize("seed", range(60))
def test_every_generated_answer_parses_and_agrees(seed: int) -> None:
    rng = random.Random(seed)
    story = make_story(rng)
    for question in ask_some(rng, story.facts, 12):
        assert parse(question.answer) is not None, question.answer
        assert agrees(question.answer, story.facts), (question.answer, story.text)


@pytest.mark.parametrize("seed", range(60))
def test_every_generated_story_parses_to_its_facts(seed: int) -> None:
    story = make_story(random.Random(seed))
    readings = parse_story(story.text)
    assert readings is not None, story.text
    assert len(readings) == len(story.told)
    assert all(fact in reading for fact, reading in zip(story.told, readings, strict=True))


@pytest.mark.parametrize("facts", [lasting_facts(), sums()], ids=["lasting", "sums"])
def test_answers_about_the_world_agree(facts: tuple[object, ...]) -> None:
    known = (*lasting_facts(), *sums())
    for question in ask_some(random.Random(0), known, 200):
        assert agrees(question.answer, known), question.answer


@pytest.mark.parametrize("seed", range(60))
def test_yes_and_no_answers_agree(seed: int) -> None:
    rng = random.Random(seed)
    story = make_story(rng)
    checked = check(rng, story.facts)
    if checked is not None:
        assert checked[1].startswith(("Yes, ", "No, "))
        assert agrees(checked[1], story.facts)


@pytest.mark.parametrize("seed", range(100))
def test_an_answer_with_one_wrong_word_disagrees(seed: int) -> None:
    story, question = held_out_question(seed)
    form = next(f for _, slot, i in ASKED[question.fact.relation] for f in [ANSWERED[question.fact.relation][i]])
    slots = dict(question.fact.slots)
    named = [s for s in slots if "{" + s + "}" in form]
    slot = random.Random(seed).choice(named)
    taken = {value for fact in story.facts for _, value in fact.slots}
    slots[slot] = next(w for w in vocabulary(slot) if w not in taken)
    wrong = fill(form, slots)
    assert parse(wrong) is not None, wrong
    assert not agrees(wrong, story.facts), wrong


@pytest.mark.parametrize(
    "text",
    ["", " ", "B", "fox", "Pip is a", "Pip is a fox", "Pip is an fox fox.", "The moon is a cheese.", "Yes", "Yes, ",
     "Pip is a fox. And", "Pip are a fox.", "Pip is a car.", "Pip is a fox.. ", "\x00", "Pip is a fox.\nPip is a car."],
)  # fmt: skip
def test_garbage_does_not_parse(text: str) -> None:
    assert parse(text) is None
    assert not agrees(text, [claim("kind", who="Pip", kind="fox")])


def test_a_claim_may_say_less_than_the_fact() -> None:
    facts = [claim("owns", who="Pip", colour="red", thing="ball")]
    assert agrees("The ball is red.", facts)
    assert agrees("Pip has a red ball.", facts)
    assert not agrees("The ball is blue.", facts)
    assert not holds(claim("lost", who="Pip", thing="ball"), facts)


def test_every_sentence_of_an_answer_must_agree() -> None:
    facts = [claim("kind", who="Pip", kind="fox"), claim("home", who="Pip", place="barn")]
    assert agrees("Pip is a fox. Pip lives in the barn.", facts)
    assert not agrees("Pip is a fox. Pip lives in the cave.", facts)


def test_articles_follow_the_word() -> None:
    assert fill("{who} is a {kind}.", {"who": "Pip", "kind": "owl"}) == "Pip is an owl."
    assert agrees("Pip is an owl.", [claim("kind", who="Pip", kind="owl")])


def test_every_form_names_slots_that_exist() -> None:
    for forms in (*TOLD.values(), *ANSWERED.values()):
        for form in forms:
            assert fill(form, {slot: vocabulary(slot)[0] for slot in _slots(form)})
    for relation, asked in ASKED.items():
        for text, slot, form_index in asked:
            assert slot in _slots(ANSWERED[relation][form_index])
            assert slot not in _slots(text), f"{text} gives its answer away"
    for relation, (text, slot, form_index) in CHECKED.items():
        assert slot in _slots(text) and slot in _slots(ANSWERED[relation][form_index])


def _slots(template: str) -> list[str]:
    return [part.partition("}")[0] for part in template.split("{")[1:]]
