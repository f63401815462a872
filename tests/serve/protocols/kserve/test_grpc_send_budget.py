"""What gRPC holds for clients that do not take it: how much a connection may have, and what is left to others."""

import random
from collections import Counter
from functools import partial

import pytest

from millrace.model_repository.request.status_code import StatusError
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES
from millrace.serve.protocols.kserve.grpc.send_budget import SendBudget, SendBudgetLease

MIB = 1 << 20
MOST = 256 * MIB


def filled(untaken: SendBudget, peer: str, n_bytes: int) -> list[SendBudgetLease]:
    """As many answers of that size as it gets."""
    found = list[SendBudgetLease]()
    while True:
        share = untaken.lease(partial(str, peer))
        try:
            share.add(n_bytes)
        except StatusError:
            return found
        found.append(share)


def test_each_gets_half_of_what_those_before_it_left() -> None:
    untaken = SendBudget(MOST)
    held = {peer: filled(untaken, peer, MIB) for peer in "abc"}
    assert [len(shares) for shares in held.values()] == [128, 64, 32]
    with pytest.raises(StatusError, match=f"answers of {224 * MIB} bytes wait for their readers, {128 * MIB} of them"):
        untaken.check("a")
    untaken.check("d")
    for share in held["a"]:
        share.close()
    assert len(filled(untaken, "d", MIB)) == 80, "of the 160 that there are"


def test_short_answers_are_free() -> None:
    untaken = SendBudget(MOST)
    filled(untaken, "a", MIB)
    for _ in range(10):
        untaken.lease(lambda: "a").add(UNCOUNTED_BODY_BYTES)


def test_one_answer_may_be_larger_than_all_and_leaves_half_to_others() -> None:
    untaken = SendBudget(MOST)
    huge = untaken.lease(lambda: "a")
    huge.add(3 * MOST)
    with pytest.raises(StatusError):
        untaken.lease(lambda: "b").add(3 * MOST)
    assert len(filled(untaken, "b", MIB)) == 64
    with pytest.raises(StatusError):
        untaken.check("a")


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_plain_counting(seed: int) -> None:
    rng, untaken, held = random.Random(seed), SendBudget(MOST), list[tuple[str, int, SendBudgetLease]]()
    for _ in range(400):
        if held and rng.random() < 0.45:
            peer, n_bytes, share = held.pop(rng.randrange(len(held)))
            share.take_off(n_bytes) if rng.random() < 0.5 else share.close()
            continue
        peer, n_bytes = rng.choice("abcdef"), rng.choice([UNCOUNTED_BODY_BYTES + 1, MIB, 20 * MIB, 60 * MIB, 150 * MIB])
        own = Counter[str]()
        for other, n, _ in held:
            own[other] += n
        room = MOST - sum(min(n, MOST // 2) for n in own.values())
        share = untaken.lease(partial(str, peer))
        try:
            share.add(n_bytes)
        except StatusError:
            assert own and own[peer] + n_bytes > room
        else:
            assert not own or own[peer] + n_bytes <= room
            held.append((peer, n_bytes, share))
    for _, _, share in held:
        share.close()
    assert not untaken._by_peer
