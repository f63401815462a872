"""What hypothesis draws: the same examples each time in the fast suite; in a night many more, with a new seed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

FAST, NIGHT = "fast", "night"
TIMES = 80  # what a night draws of what the fast suite does: of the runtime some forty minutes on two idle cores
_USUAL = 100  # of a profile that says nothing
SEEDS = st.integers(0, 2**32 - 1)  # of histories with more turns than hypothesis can draw


def register_profiles() -> None:
    """`fast` is taken unless --hypothesis-profile names another one."""
    settings.register_profile(FAST, max_examples=_USUAL, deadline=None, derandomize=True)
    settings.register_profile(NIGHT, max_examples=TIMES * _USUAL, deadline=None, derandomize=False, print_blob=True)
    settings.load_profile(FAST)


def examples(n: int, by_night: int = 1) -> int:
    """For a test that draws `n` in the fast suite, and in a night as often as one of `by_night * n`."""
    drawn = settings().max_examples
    return n * drawn // _USUAL * (by_night if drawn > _USUAL else 1)


def within(seconds: int) -> pytest.MarkDecorator:
    """A time for each test of a file that draws; by night, which draws more, as many times as long.

    A plain `timeout` would hold by night, too, since it goes before the command line's.
    """
    return pytest.mark.timeout(seconds * settings().max_examples // _USUAL)
