"""The incremental detokenizer against `decode`: whole characters, the same text, and time that grows with the ids."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer, Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from tests.support.vocabularies import KINDS, OF_DECODERS, strange_text


def chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    parts, at = [], 0
    while at < len(ids):
        n = rng.choice([1, 1, 1, 2, 5])
        parts.append(ids[at : at + n])
        at += n
    return parts


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pushes_add_up_to_decode(folder: Callable[[str], Path], kind: str, skip: bool) -> None:
    tokenizer = open_tokenizer(folder(kind))
    for seed in range(40):
        rng = random.Random(seed)
        text = strange_text(rng, rng.randint(1, 40)).replace("\ufffd", "")
        ids = tokenizer.encode(text, add_special_tokens=rng.random() < 0.5)
        at = rng.randint(0, len(ids))
        for prompt, rest in (([], ids), (ids[:at], ids[at:])):
            detokenizer = Detokenizer(tokenizer, skip, prompt)
            pushed = [detokenizer.push(part) for part in chunks(rest, rng)]
            assert "\ufffd" not in "".join(pushed), "an unfinished character was given out"
            got = "".join(pushed) + detokenizer.flush()
            before = tokenizer.decode(prompt, skip).rstrip("\ufffd")  # where the cut goes through a character
            assert before + got == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", OF_DECODERS)
def test_any_ids_add_up_to_decode(folder: Callable[[str], Path], kind: str) -> None:
    """Random ids: broken characters, special tokens in their midst, ids beyond the vocabulary."""
    tokenizer = open_tokenizer(folder(kind))
    for seed in range(60):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.vocab_size + 3) if rng.random() < 0.4 else rng.randrange(262) for _ in range(50)]
        detokenizer = Detokenizer(tokenizer)
        got = "".join(detokenizer.push(part) for part in chunks(ids, rng)) + detokenizer.flush()
        data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
        assert got == tokenizer.decode(ids)
        assert got.lstrip(" ") == data.decode("utf-8", "replace").lstrip(" ")


def test_a_character_of_four_tokens_comes_out_whole(folder: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(folder("byte fallback"))
    ids = [3 + byte for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    detokenizer.push(ids[:3])
    assert detokenizer.flush() == "\ufffd"
    split = Detokenizer(tokenizer, prompt=ids[:2])
    assert split.push(ids[2:]) == "😀"


def test_the_leading_space_depends_on_what_came_before(folder: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(folder("byte fallback"))
    mill = tokenizer.encode("mill", add_special_tokens=False)
    assert Detokenizer(tokenizer).push(mill) == "mill"
    assert Detokenizer(tokenizer, prompt=[1]).push(mill) == "mill", "<s> is skipped, so this is the start"
    assert Detokenizer(tokenizer, skip_special_tokens=False, prompt=[1]).push(mill) == " mill"
    assert Detokenizer(tokenizer, prompt=tokenizer.encode("the")).push(mill) == " mill"


def test_many_ids_in_one_push_are_linear(folder: Callable[[str], Path]) -> None:
    """3.9 million of them came in one request: quadratic copying took minutes, and half a million 20 s."""
    tokenizer = open_tokenizer(folder("byte level"))
    ids = [max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))] * 500_000
    start_s = time.perf_counter()
    text = tokenizer.decode(ids)
    assert time.perf_counter() - start_s < 5
    assert len(text) == 500_000 * len(tokenizer.decode(ids[:1]))


def test_pushing_is_linear(folder: Callable[[str], Path]) -> None:
    """Each token is looked at once: the work per push does not depend on how many came before."""
    looked: list[int] = []
    tokenizer = open_tokenizer(folder("byte level"))

    class Counting(Tokenizer):
        def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
            looked.append(token_id)
            return tokenizer.token_bytes(token_id, first=first)

        def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise NotImplementedError

        _token_bytes = _first_bytes = tokenizer._token_bytes

    detokenizer = Detokenizer(Counting(tokenizer.vocab_size, tokenizer.specials), prompt=list(range(200)) * 50)
    opening = len(looked)
    for _ in range(1000):
        detokenizer.push([70])
    assert opening < 20 and len(looked) - opening <= 2000
