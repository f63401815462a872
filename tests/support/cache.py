"""A cache of the tests' own, so that nothing touches the user's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def own_cache(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """XDG_CACHE_HOME, and no hub: in this process, and in those that it starts."""
    folder = factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder
