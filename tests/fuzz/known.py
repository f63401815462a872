"""Failures that are known and reported, by target: they are counted, and do not fail a run. Shrinks only."""

import re

from tests.fuzz.driver import Failure

KNOWN: dict[str, tuple[str, ...]] = {}


def is_known(failure: Failure) -> bool:
    name = failure.target.partition(":")[2]
    return any(re.search(pattern, f"{failure.kind}: {failure.detail}") for pattern in KNOWN.get(name, ()))
