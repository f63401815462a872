"""Every kernel test runs on each instruction set that this machine has, and on AMX's emulated one."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from millrace.kernels.precision import BF16_BY_TILES
from tests.support.emulated_amx import EMULATED, KERNEL_ISAS, emulation
from tests.support.one_step import Machine


@pytest.fixture(autouse=True)
def amx_is_emulated() -> Iterator[None]:
    with emulation():
        yield


@pytest.fixture(params=KERNEL_ISAS)
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(str(request.param))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By day AMX is emulated for what takes its tiles and is small; the rest is `make nightly PARTS=emulated-amx`."""
    for item in items:
        given: Mapping[str, Any] = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        if given.get("machine") == EMULATED and not _by_day(given):
            item.add_marker(pytest.mark.nightly)


def _by_day(given: Mapping[str, Any]) -> bool:
    tiled = given.get("kind", given.get("format")) in (BF16_BY_TILES, "w8a8", "w4a8")
    return tiled and given.get("T", 1) <= 65 and max(given.get("shape", (1,))) <= 128
