"""The world is a function of seeds, and what is held out is never trained on."""

import random

import pytest

from tools.tiny.items import Choice, Question, is_held_out, lasting_facts, offer, sum_key, sums
from tools.tiny.stories import Wish, make_story
from tools.tiny.world import (
    document,
    held_out_exam,
    held_out_question,
    held_out_story,
    held_out_sum,
    trained_choice,
    trained_story,
)


def _text(seed: int, episodes: int = 1) -> str:
    return "".join(piece.text for piece in document(seed, episodes))


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_gives_one_document(seed: int) -> None:
    assert document(seed) == document(seed)
    assert held_out_exam(seed) == held_out_exam(seed)
    assert held_out_question(seed) == held_out_question(seed)


def test_seeds_give_different_documents() -> None:
    assert len({_text(seed) for seed in range(200)}) == 200


def test_a_telling_does_not_change_the_key_of_a_story() -> None:
    story = make_story(random.Random(3))
    tellings = {make_story(random.Random(3)).key, story.key}
    assert len(tellings) == 1
    assert story.text not in story.key


@pytest.mark.parametrize("seed", range(100))
def test_what_is_trained_on_is_not_held_out(seed: int) -> None:
    rng = random.Random(seed)
    assert not is_held_out(trained_story(rng).key)
    assert not is_held_out(trained_story(rng, Wish(hero_kind="fox")).key)
    choice = trained_choice(rng)
    arithmetic = choice.question.fact.relation in ("sum", "difference")
    assert not is_held_out(sum_key(choice.question.fact) if arithmetic else choice.key)


@pytest.mark.parametrize("seed", range(100))
def test_what_is_held_out_is_so_by_its_content(seed: int) -> None:
    assert is_held_out(held_out_story(seed).key)
    assert is_held_out(sum_key(held_out_sum(seed).fact))
    exam = held_out_exam(seed)
    match exam.category:
        case "story":
            assert exam.context
        case "sum":
            assert is_held_out(sum_key(exam.choice.question.fact))
        case _:
            assert is_held_out(exam.choice.key)


def test_no_held_out_story_or_sum_appears_in_training_text() -> None:
    trained = [_text(seed) for seed in range(3000)]
    asked = {line for text in trained for line in text.replace("<|", "\n<|").replace("|>", "|>\n").split("\n")}
    assert not [q for q in (held_out_sum(seed).text for seed in range(200)) if q in asked]
    whole = "\n".join(trained)
    assert not [s for s in (held_out_story(seed).text for seed in range(200)) if s in whole]


def test_about_one_item_in_ten_is_held_out() -> None:
    share = sum(is_held_out(make_story(random.Random(seed)).key) for seed in range(2000)) / 2000
    assert 0.07 < share < 0.13


def test_letters_are_shuffled_evenly() -> None:
    letters = [held_out_exam(seed).choice.letter for seed in range(600)]
    assert all(100 < letters.count(letter) < 200 for letter in "ABCD")


def _is_right(choice: Choice, option: str) -> bool:
    return option == choice.question.value


@pytest.mark.parametrize("seed", range(200))
def test_a_choice_has_four_options_and_one_is_right(seed: int) -> None:
    choice = held_out_exam(seed).choice
    assert len(set(choice.options)) == 4
    assert [_is_right(choice, o) for o in choice.options].count(True) == 1
    assert choice.options[choice.right] == choice.question.value
    assert choice.prompt.endswith(f"\nD. {choice.options[3]}\nAnswer:")


def test_a_story_has_what_was_wished_for() -> None:
    for seed in range(100):
        story = make_story(random.Random(seed), Wish(hero_kind="fox", pal_kind="owl", hero="Pip", thing="kite"))
        assert all(word in story.text for word in ("fox", "owl", "Pip", "kite"))


def test_sums_are_right() -> None:
    for fact in sums():
        a, b = int(fact["a"]), int(fact["b"])
        assert (a + b == int(fact["sum"])) if fact.relation == "sum" else (a - b == int(fact["difference"]))


def test_wrong_numbers_are_near_the_right_one() -> None:
    fact = next(f for f in sums() if f["a"] == "7" and f["b"] == "8")
    question = Question("What is 7 + 8?", "7 + 8 = 15.", fact, "sum")
    choice = offer(random.Random(0), question, ())
    assert all(abs(int(o) - 15) <= 10 for o in choice.options)


def test_every_lasting_fact_is_stated_once() -> None:
    assert len(set(lasting_facts())) == len(lasting_facts())


def test_longer_documents_hold_more_episodes() -> None:
    seeds = range(200_000, 200_050)
    assert sum(len(_text(s, episodes=8)) for s in seeds) > 4 * sum(len(_text(s)) for s in seeds)
