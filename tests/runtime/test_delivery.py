"""When answers are given away: while the next step runs, for whoever is woken wants a processor, too."""

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams
from tests.runtime.clients import GREEDY, PAGE, Client, answered, solo
from tests.runtime.fakes import limits, make_loop


def told(loop: EngineLoop, n_tokens: int) -> list[str]:
    """What happens, in order; the loop's executor and its one client write it."""
    said: list[str] = []
    executor = loop._executor

    def saying(word: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            said.append(word)
            return call(*arguments)

        return wrapped

    executor.launch = saying("launch", executor.launch)  # type: ignore[method-assign,assignment]
    executor.wait = saying("wait", executor.wait)  # type: ignore[method-assign,assignment]

    def deliver(deltas: list[Delta]) -> None:
        said.append("end" if deltas[-1].finish_reason else "token")

    loop.submit([1, 2, 3], SamplingParams(max_tokens=n_tokens, ignore_eos=True), deliver)
    return said


def test_a_token_is_given_away_while_the_next_one_is_computed() -> None:
    loop = make_loop()
    said = told(loop, 3)
    while loop.step(defer_delivery=True):
        pass
    assert said == ["launch", "wait", "launch", "token", "wait", "launch", "token", "wait", "end"]


def test_stepped_by_hand_each_step_gives_what_it_has() -> None:
    loop = make_loop()
    said = told(loop, 2)
    while loop.step():
        pass
    assert said == ["launch", "wait", "token", "launch", "wait", "end"]


def test_two_steps_under_way() -> None:
    """A step's tokens are given away once the step behind the next one is on its way."""
    loop = make_loop(depth=2)
    said = told(loop, 4)
    while loop.step(defer_delivery=True):
        pass
    assert said == [
        "launch", "launch", "wait", "launch", "token", "wait", "launch", "token", "wait", "token", "wait", "end",
    ]  # fmt: skip


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_ends_is_told_though_others_go_on(goes_on: bool) -> None:
    """Whatever still runs; and cancelled between two steps, it gets what was drawn for it, and its end."""
    loop = make_loop()
    short, long = Client(loop, [1, 2], GREEDY), Client(loop, [3], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(GREEDY.max_tokens or 0):
        assert loop.step(goes_on)
    assert bool(short.reasons) is not goes_on
    loop.cancel(long.request)
    while loop.step(goes_on):
        pass
    assert short.reasons == [FinishReason.LENGTH] and long.reasons == [FinishReason.ABORT]
    assert len(short.outputs[0].token_ids) == len(long.outputs[0].token_ids) == 3


LONG = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_callback_that_raises_loses_no_step(depth: int, at: int) -> None:
    """Stepped by hand, as with Ctrl-C: the step under way is waited for by the next one, and its tokens are told."""
    loop, n_reported = make_loop(limits(page_tokens=PAGE), depth=depth), 0

    def deliver(deltas: list[Delta]) -> None:
        nonlocal n_reported
        n_reported += 1
        if n_reported == at:
            raise KeyboardInterrupt

    before = Client(loop, [4, 5], LONG)
    loop.submit([1, 2, 3], LONG, deliver)
    behind = Client(loop, [6], LONG)
    with pytest.raises(KeyboardInterrupt):
        while loop.step(defer_delivery=True):
            pass
    while loop.step(defer_delivery=True):
        pass
    assert before.outputs == solo(before.prompt, LONG) and behind.outputs == solo(behind.prompt, LONG)
    assert loop.stats().pages_used == 0 and loop.stats().healthy and n_reported == 9


def test_stopped_after_a_callback_that_raised() -> None:
    """What is under way is waited for: a loop that has stopped may be stepped again."""
    loop, raised = make_loop(depth=2), list[int]()

    def deliver(deltas: list[Delta]) -> None:
        if not raised:
            raised.append(len(loop._in_flight))
            raise KeyboardInterrupt

    loop.submit([1, 2, 3], LONG, deliver)
    other = Client(loop, [4, 5], LONG)
    with pytest.raises(KeyboardInterrupt):
        while loop.step(defer_delivery=True):
            pass
    loop.stop()
    assert raised == [2] and not loop._in_flight and other.reasons == [FinishReason.ABORT]
    assert loop.stats().pages_used == 0
    again = Client(loop, [4, 5], LONG)
    while loop.step(defer_delivery=True):
        pass
    assert again.outputs == solo([4, 5], LONG)


def test_no_token_waits_for_pages_that_another_has_on_the_disk(tmp_path: Path) -> None:
    loop = make_loop(limits(page_tokens=PAGE, n_pages=16, max_context=48), tier=tmp_path / "tier")
    known = list(range(1, 22))
    for prompt in (known, *([40 + i] * 37 for i in range(2))):
        answered(loop, prompt)
    tier, said = loop._pool.tier, list[str]()
    assert tier is not None
    fill = tier.fill
    tier.fill = lambda key, page: said.append("disk") or fill(key, page)  # type: ignore[method-assign,func-returns-value]
    loop.submit([4, 5], LONG, lambda deltas: said.append("token"))
    for _ in range(3):
        loop.step(defer_delivery=True)
    assert said == ["token"] * 2 and tier.n_found == 0
    loop.submit(known, GREEDY, lambda deltas: None)
    loop.step(defer_delivery=True)
    assert said[:4] == ["token", "token", "token", "disk"] and tier.n_found > 1
    tier.close()


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_in_the_thread_keeps_no_others_end() -> None:
    """What had ended with the same step is told as it ended; and whoever was held while the engine computes goes on."""
    loop, computing = make_loop(), list[bool]()

    def deliver(deltas: list[Delta]) -> None:
        if len(computing) >= 6:
            raise ValueError("a defect")

    loop.submit([1, 2, 3], LONG, deliver)
    ends_with_it = Client(loop, [4, 5], SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    loop.start(computing=computing.append)
    while loop.stats().healthy:
        pass
    loop.stop()
    assert ends_with_it.reasons == [FinishReason.LENGTH] and len(ends_with_it.outputs[0].token_ids) == 3
    assert computing[-1] is False


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nor_does_one_that_raises_at_its_end_too() -> None:
    """Whoever waits for a place is told that there will be none, and whoever looks after the engine hears of it."""
    loop, looked = make_loop(limits(max_sequences=1)), list[bool]()

    def deliver(deltas: list[Delta]) -> None:
        raise ValueError("a defect")

    loop.submit([1, 2, 3], LONG, deliver)
    waiting = [Client(loop, [4, i], LONG) for i in range(3)]
    loop.start(lambda: looked.append(loop.stats().healthy))
    while loop.stats().healthy:
        pass
    loop.stop()
    assert [client.reasons for client in waiting] == [[FinishReason.ERROR]] * 3 and looked == [False]
