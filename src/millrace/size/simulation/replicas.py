"""Several replicas behind a router on a common virtual time, each with its own clock and engine loop.

The sequential calls of a request stay on one replica. A router sees what real ones see: the requests in flight of
each replica, and the prefixes that it was sent.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from millrace.errors import ConfigError
from millrace.size.simulation.simulator import SimulatedServer, Simulation, SimulationResult
from millrace.size.simulation.virtual_clock import Arrival

Router = Callable[[Arrival, Sequence["Routed"]], int]
_MAX_REPLICAS = 4096
_CROWDED = 4  # extra requests in flight from which a known prefix no longer outweighs the load


class Routed(SimulatedServer):
    """A replica behind a router. prefixes: keys of the block-aligned prefixes that it was sent"""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.prefixes: set[int] = set()

    def admit(self, arrival: Arrival) -> None:
        super().admit(arrival)
        self.prefixes.update(_chain(arrival.blocks))

    def matching_blocks(self, blocks: tuple[int, ...]) -> int:
        """Return how many leading blocks the replica has seen before."""
        return sum(1 for _ in takewhile(self.prefixes.__contains__, _chain(blocks)))


def _chain(blocks: tuple[int, ...]) -> Iterator[int]:
    """Yield a key for each prefix: a hash of the previous key and the block."""
    key = 0
    for block in blocks:
        key = hash((key, block))
        yield key


def simulate(simulations: Sequence[Simulation], arrivals: Iterable[Arrival], route: Router) -> list[SimulationResult]:
    """Route arrivals, which are in time order, and return the result of each replica. raises ConfigError"""
    if not 0 < len(simulations) <= _MAX_REPLICAS:
        raise ConfigError(f"{len(simulations)} replicas", f"1 to {_MAX_REPLICAS}", "correct it")
    servers = [Routed(simulation) for simulation in simulations]
    for arrival in simulations[0].check(arrivals):
        for server in servers:
            server.advance(arrival.at_s)
        servers[route(arrival, servers)].admit(arrival)
    for server in servers:
        server.advance(math.inf)
    return [server.result() for server in servers]


def merge_routed(results: Sequence[SimulationResult]) -> SimulationResult:
    """Merge the results of all replicas."""
    requests = sorted(
        (request for result in results for request in result.requests), key=lambda request: request.arrival.came_s
    )
    return SimulationResult(
        tuple(requests), max(result.seconds for result in results), sum(result.steps for result in results),
        sum(result.preemptions for result in results), sum(result.prefix_hits for result in results),
        sum(result.in_system_s for result in results),
    )  # fmt: skip


def random_router(seed: int = 0) -> Router:
    """Route at random, like DNS load balancing."""
    rng = np.random.default_rng(seed)
    return lambda _, servers: int(rng.integers(len(servers)))


def router(routing: str, seed: int = 0) -> Router:
    """Return the router with this name."""
    routers: dict[str, Router] = {"least-loaded": least_loaded, "prefix-aware": prefix_aware}
    return random_router(seed) if routing == "blind" else routers[routing]


def least_loaded(_: Arrival, servers: Sequence[Routed]) -> int:
    """Route to the replica with the fewest requests; ties: the first."""
    return min(range(len(servers)), key=lambda i: (servers[i].in_flight, i))


def prefix_aware(arrival: Arrival, servers: Sequence[Routed]) -> int:
    """Route to the replica that knows the longest prefix unless it is overloaded; ties: the fewest requests."""
    least = min(server.in_flight for server in servers)
    free = [i for i, server in enumerate(servers) if server.in_flight <= 2 * least + _CROWDED]
    return max(free, key=lambda i: (servers[i].matching_blocks(arrival.blocks), -servers[i].in_flight, -i))
