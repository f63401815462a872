"""Little's law in every simulation that any test here runs: whoever is in the system waits, and nobody else does."""

from collections.abc import Iterator

import pytest

from millrace.size.simulation.simulator import SimulatedServer, SimulationResult

_result = SimulatedServer.result


@pytest.fixture(autouse=True, scope="session")
def littles_law() -> Iterator[None]:
    """Before fixtures of modules, which simulate, too."""

    def held(server: SimulatedServer) -> SimulationResult:
        found = _result(server)
        waited_s = sum(one.e2e_s for one in found.requests)
        assert found.in_system_s == pytest.approx(waited_s, rel=1e-6, abs=1e-9), "rate x time is not what was in flight"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedServer, "result", held)
        yield
