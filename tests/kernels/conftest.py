"""Every kernel test runs on each instruction set that this machine has."""

import pytest

from millrace.kernels.library import usable_isas
from tests.support.one_step import Machine


@pytest.fixture(params=usable_isas())
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(str(request.param))
