"""Several replicas behind a router, on one virtual time: each is the loop that serves, with a clock of its own. Calls
of a request in a row stay at one.

A router sees what one sees in practice: how many requests each replica has, and which beginnings it was sent.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from millrace.errors import ConfigError
from millrace.size.simulation.simulator import Server, Simulated, Simulation
from millrace.size.simulation.virtual_clock import Arrival

Router = Callable[[Arrival, Sequence["Routed"]], int]
_MOST_REPLICAS = 4096
_CROWDED = 4  # requests more than the emptiest has, from which on a known beginning is not worth it


class Routed(Server):
    """known: beginnings that it was sent, as far as whole blocks go"""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.known: set[int] = set()

    def take(self, arrival: Arrival) -> None:
        super().take(arrival)
        self.known.update(_chain(arrival.blocks))

    def shared(self, blocks: tuple[int, ...]) -> int:
        """Blocks of that beginning that it was sent before."""
        return sum(1 for _ in takewhile(self.known.__contains__, _chain(blocks)))


def _chain(blocks: tuple[int, ...]) -> Iterator[int]:
    """A key for each beginning: of the one before, and the block."""
    key = 0
    for block in blocks:
        key = hash((key, block))
        yield key


def simulate(simulations: Sequence[Simulation], arrivals: Iterable[Arrival], route: Router) -> list[Simulated]:
    """Each replica's share of the arrivals, which come in the order of their times. raises ConfigError"""
    if not 0 < len(simulations) <= _MOST_REPLICAS:
        raise ConfigError(f"{len(simulations)} replicas", f"1 to {_MOST_REPLICAS}", "correct it")
    servers = [Routed(one) for one in simulations]
    for arrival in simulations[0].checked(arrivals):
        for server in servers:
            server.advance(arrival.at_s)
        servers[route(arrival, servers)].take(arrival)
    for server in servers:
        server.advance(math.inf)
    return [server.result() for server in servers]


def merge_routed(found: Sequence[Simulated]) -> Simulated:
    """All replicas as one."""
    requests = sorted((one for each in found for one in each.requests), key=lambda one: one.arrival.came_s)
    return Simulated(
        tuple(requests), max(each.seconds for each in found), sum(each.steps for each in found),
        sum(each.preemptions for each in found), sum(each.prefix_hits for each in found),
        sum(each.in_system_s for each in found),
    )  # fmt: skip


def random_router(seed: int = 0) -> Router:
    """By chance, as many servers behind one name are found."""
    rng = np.random.default_rng(seed)
    return lambda _, servers: int(rng.integers(len(servers)))


def router(routing: str, seed: int = 0) -> Router:
    """One of ROUTINGS, by its name."""
    known: dict[str, Router] = {"least-loaded": least_loaded, "prefix-aware": prefix_aware}
    return random_router(seed) if routing == "blind" else known[routing]


def least_loaded(_: Arrival, servers: Sequence[Routed]) -> int:
    """The one with the fewest requests; the first of several."""
    return min(range(len(servers)), key=lambda i: (servers[i].in_flight, i))


def prefix_aware(arrival: Arrival, servers: Sequence[Routed]) -> int:
    """The one that knows most of the beginning, unless it is crowded; of several the one with the fewest requests."""
    least = min(server.in_flight for server in servers)
    free = [i for i, server in enumerate(servers) if server.in_flight <= 2 * least + _CROWDED]
    return max(free, key=lambda i: (servers[i].shared(arrival.blocks), -servers[i].in_flight, -i))
