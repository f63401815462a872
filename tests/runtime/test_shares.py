"""What tenants get: what tokens count, where newcomers begin, and how far apart two that are always busy can be."""

from collections.abc import Sequence as Ordered
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.runtime.request.queue_options import QueueOptions
from millrace.runtime.request.request import Request, Sequence
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling import admission_policy as order_module
from millrace.runtime.scheduling.admission_policy import AdmissionQueue, fcfs
from millrace.runtime.scheduling.token_budget import TokenBudget
from tests.runtime.fakes import limits, new_request
from tests.runtime.test_admission_policy import Crowd
from tests.runtime.test_scheduler import ran
from tests.support.drawn import examples


def tenant_of(seq: Sequence) -> str:
    return seq.request.queue_options.tenant


def ask(crowd: Crowd, tenants: str, n_prompt: int = 4) -> None:
    """A request of each, with prompts that begin unlike: what is known costs nobody anything."""
    for tenant in tenants:
        crowd.joins(n_prompt, first=2 + crowd.sched._n_arrived % 90, tenant=tenant)


def served(crowd: Crowd, n: int, n_tokens: int = 1) -> str:
    """Whose requests the next n are."""
    return "".join(tenant_of(crowd.serve(n_tokens)) for _ in range(n))


# ------------------------------------------------------------------ what counts


@pytest.mark.parametrize("prompt, n_tokens, goes", [(15, 1, "b"), (21, 1, "a")])
def test_a_token_of_an_answer_counts_as_two_of_a_prompt(prompt: int, n_tokens: int, goes: str) -> None:
    """a has had 3 + 2 * 8 = 19, and b 14 + 2 or 20 + 2. By one it would be 11 and 15, by three 27 and 23."""
    crowd = Crowd()
    for tenant, n_prompt in (("a", 4), ("b", prompt), ("a", 4), ("b", 4)):
        ask(crowd, tenant, n_prompt)
    assert served(crowd, 1, n_tokens=8) + served(crowd, 1, n_tokens) + served(crowd, 1) == "ab" + goes


def test_places_that_fall_free_at_once_are_shared() -> None:
    """Each prompt that is given a place counts for the next one, before anything of it is computed."""
    crowd = Crowd(max_sequences=4)
    ask(crowd, "aaaaaa", 4)
    ask(crowd, "bbbbbb", 8)
    ran(crowd.sched)
    assert "".join(map(tenant_of, crowd.sched.running)) == "abaa", "a 4, b 8, a 8; as much: who came first"


# ------------------------------------------------------------------ newcomers


def test_a_newcomer_begins_with_what_the_one_has_had_that_had_least() -> None:
    """Not with nothing, nor with what others did: 4 tokens of a prompt and one of an answer are 5."""
    crowd = Crowd()
    ask(crowd, "ab" * 10)
    assert served(crowd, 1, n_tokens=20) + served(crowd, 1, n_tokens=6) == "ab", "43 and 15"
    ask(crowd, "c" * 10)
    assert served(crowd, 13) == "bc" * 6 + "a", "both go up to 45"


def test_who_had_more_and_comes_back_has_still_had_it() -> None:
    crowd = Crowd()
    ask(crowd, "a" + "b" * 12)
    assert served(crowd, 1, n_tokens=20) + served(crowd, 1) == "ab", "43 and 5"
    ask(crowd, "a")
    assert served(crowd, 9) == "b" * 8 + "a", "b goes up to 45"


def test_what_was_computed_while_nobody_waited_is_nobodys_debt() -> None:
    """A night of one tenant alone, and in the morning another one comes first: it has no night in hand."""
    crowd = Crowd()
    for _ in range(20):
        ask(crowd, "a")
        served(crowd, 1, n_tokens=20)
    ask(crowd, "bbba")
    assert served(crowd, 4) == "babb"


@pytest.mark.parametrize("before", ["a", "b"])
def test_who_comes_begins_where_service_is_though_somebody_slow_had_less(before: str) -> None:
    """c has one place for one long answer and asks for nothing more; a has had ten prompts in the other one.

    Whether b was there before makes no difference.
    """
    crowd = Crowd(max_sequences=2, max_step_tokens=64)
    crowd.sched.budget = TokenBudget.unhurried(64)
    slow = crowd.joins(2, tenant="c")
    ran(crowd.sched)

    def goes_next() -> str:
        ran(crowd.sched)
        (seq,) = (seq for seq in crowd.sched.running if seq is not slow)
        assert seq.n_output == 1
        crowd.sched.remove(seq)
        return tenant_of(seq)

    for tenant in before + "a" * 10:
        ask(crowd, tenant, 30)
        assert goes_next() == tenant
    ask(crowd, "bbbbaa", 30)
    assert "".join(goes_next() for _ in range(4)) == "bbab", "one prompt of a was still to be caught up with"


def test_so_many_tenants_are_remembered_and_who_came_the_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forgotten one is as one that comes now; who comes again in time is not forgotten."""
    monkeypatch.setattr(order_module, "MAX_TENANTS", 4)
    order = AdmissionQueue(fcfs, lambda: 0.0, lambda seq: 0)

    def of(tenant: str) -> Request:
        return new_request([1], SamplingParams(), limits(), queue_options=QueueOptions(tenant=tenant))

    def arrives(tenant: str) -> Sequence:
        request = of(tenant)
        order.add(request, [of("slow")])
        return request.choices[0]

    for tenant, n in (("a", 50), ("b", 40), ("c", 30), ("d", 20)):
        order.record_tokens(arrives(tenant), n, 0)
    again, _ = arrives("a"), arrives("e")
    assert len(order._usage) == 4
    seqs = [again, arrives("d"), arrives("c"), of("b").choices[0]]
    for turn, seq in enumerate(seqs):
        seq.request.order = turn
    assert "".join(map(tenant_of, order.ordered(seqs))) == "bdca", "50 are known of a, and nothing of b"


# ------------------------------------------------------------------ how far apart


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=6)


class Busy:
    """Two tenants that always have more waiting than there are places. sizes: of prompts and answers, again and again

    had: what each has had: a token that is computed counts one, and one that is drawn one more
    """

    def __init__(self, places: int, a: Ordered[tuple[int, int]], b: Ordered[tuple[int, int]], **of: int) -> None:
        self.crowd, self.places = Crowd("fcfs", max_sequences=places, max_context=64, **of), places
        self.had, self.sizes = {"a": 0, "b": 0}, {"a": cycle(a), "b": cycle(b)}
        self.largest = max(n_prompt - 1 + 2 * n for n_prompt, n in (*a, *b))
        self._ends: dict[Sequence, int] = {}

    def step(self) -> int:
        """The difference after it."""
        sched = self.crowd.sched
        for tenant in "ab":
            while sum(tenant_of(seq) == tenant for seq in sched.waiting) <= self.places:
                n_prompt, n = next(self.sizes[tenant])
                first = 2 + len(self._ends) % 90  # prompts that begin unlike: none waits for another
                self._ends[self.crowd.joins(n_prompt, first=first, tenant=tenant)] = n
        for chunk in ran(sched).chunks:
            self.had[tenant_of(chunk.sequence)] += chunk.n + chunk.draws
        for seq in [seq for seq in sched.running if seq.n_output >= self._ends[seq]]:
            sched.remove(seq)
        return abs(self.had["a"] - self.had["b"])


@settings(max_examples=examples(20, by_night=2))
@given(
    a=SIZES, b=SIZES, places=st.sampled_from([1, 2, 4]), n_pages=st.sampled_from([8, 12, 64]),
    max_step_tokens=st.sampled_from([4, 9, 32]),
)  # fmt: skip
def test_busy_tenants_are_apart_by_no_more_than_the_places_hold(
    a: list[tuple[int, int]], b: list[tuple[int, int]], places: int, n_pages: int, max_step_tokens: int
) -> None:
    """The bound of `admission_policy.py`, for any sizes, chunks and preemptions: with one place, one request's time."""
    busy = Busy(places, a, b, n_pages=n_pages, max_step_tokens=max_step_tokens)
    for _ in range(100):
        assert busy.step() <= places * busy.largest


@pytest.mark.parametrize("places", [1, 2, 4])
def test_the_bound_is_no_larger_than_need_be(places: int) -> None:
    """b's answers end at once, so that a has all places; then it has them for as long as its answers are."""
    busy = Busy(places, [(1, 40)], [(3, 1)])
    apart = max(busy.step() for _ in range(400))
    assert 0.8 * places * busy.largest < apart <= places * busy.largest
