"""The rate limiter: instances of all models share resources that are counted, and compute while they hold theirs.

Of those that wait the one goes first whose priority times the batches that it computed is the least, so that of
priority 2 gets half the turns of priority 1, as in Triton. Those behind it may go before it where they need nothing
that it waits for: it does not starve, and holds up nobody else. Of the event loop.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from millrace.errors import ConfigError
from millrace.model_repository.config.model_config import InstanceGroup
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.scheduling.dynamic_batcher import Batch

FLAG, RESOURCE_FLAG = "--rate-limit", "--rate-limit-resource"
_RESOURCE = re.compile(r"([^:\s]{1,200}):([0-9]{1,9})(?::([0-9]{1,9}))?")


class InstanceSlot(Protocol):
    """An instance, as far as others are concerned."""

    @property
    def batch(self) -> Batch | None:
        """That it computes."""


S = TypeVar("S", bound=InstanceSlot)


class ResourceWaiter(Protocol):
    """Who has workers."""

    def on_resources_available(self) -> None:
        """One of them that was to wait may compute now."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Of an instance. counts: of resources by name"""

    counts: Mapping[str, int]
    priority: int = 1

    @classmethod
    def of(cls, group: InstanceGroup) -> "ResourceRequest":
        said = group.rate_limiter
        if said is None:
            return cls({})
        return cls({r.name: r.count for r in said.resources if r.count}, max(1, said.priority))


@dataclass(slots=True)
class _ResourceState:
    needs: ResourceRequest
    owner: ResourceWaiter
    n_runs: int = 0

    @property
    def rank(self) -> int:
        return self.needs.priority * self.n_runs


class RateLimiter:
    """limits: of resources whose count was said; of others there are as many as the instance wants that wants most."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        self._known: dict[InstanceSlot, _ResourceState] = {}
        self._used: Counter[str] = Counter()
        self._computing: set[InstanceSlot] = set()
        self._waiting: dict[InstanceSlot, None] = {}
        self._are_global: dict[str, bool] = {}
        self._is_woken = False

    @classmethod
    def of(cls, mode: str, said: Sequence[str]) -> "RateLimiter | None":
        """said: NAME:COUNT, or NAME:COUNT:DEVICE. raises ConfigError"""
        if mode == "off":
            if said:
                raise ConfigError(f"{RESOURCE_FLAG} without {FLAG}", f"{FLAG} execution_count", "add it")
            return None
        limits: dict[str, int] = {}
        for one in said:
            found = _RESOURCE.fullmatch(one)
            if found is None:
                raise ConfigError(f"{RESOURCE_FLAG} is {one!r:.100}", "NAME:COUNT", "write it so, for one memory:4")
            if found[3] is not None and int(found[3]) != 0:
                what = f"{RESOURCE_FLAG} {one:.100} is about device {found[3]}"
                raise ConfigError(what, "device 0, the CPU: there is no other", "leave the device out")
            if found[1] in limits:
                raise ConfigError(f"{RESOURCE_FLAG} says {found[1]} twice", "once", "leave one out")
            limits[found[1]] = int(found[2])
        return cls(limits)

    def check(self, groups: Iterable[InstanceGroup]) -> None:
        """Whether instances of these may ever compute. raises StatusError, in Triton's words"""
        are_global = dict(self._are_global)
        for group in groups:
            for resource in group.rate_limiter.resources if group.rate_limiter else ():
                if are_global.setdefault(resource.name, resource.is_global) is not resource.is_global:
                    raise invalid(
                        f'Resource "{resource.name}" is present as both global and device-specific resource in the '
                        "model configuration."
                    )
                limit = self._limits.get(resource.name)
                if limit is not None and limit < resource.count:
                    raise invalid(
                        f'Resource count for "{resource.name}" is limited to {limit} which will prevent scheduling '
                        f"of one or more model instances, the minimum required count is {resource.count}"
                    )
        self._are_global = are_global

    def add(self, worker: InstanceSlot, group: InstanceGroup, owner: ResourceWaiter) -> None:
        self._known[worker] = _ResourceState(ResourceRequest.of(group), owner)

    def remove(self, workers: Iterable[InstanceSlot]) -> None:
        """They compute nothing more."""
        for worker in workers:
            self.end(worker)
            self._waiting.pop(worker, None)
            self._known.pop(worker, None)
        self._wake()  # others may have stood behind them
        there = {name for known in self._known.values() for name in known.needs.counts}
        self._are_global = {name: is_global for name, is_global in self._are_global.items() if name in there}

    def may_compute(self, worker: InstanceSlot) -> bool:
        known = self._known[worker]
        counts = known.needs.counts
        if any(self._used[name] + n > self._limit(name) for name, n in counts.items()):
            return False
        before = (other for other in self._waiting if other is not worker and self._known[other].rank < known.rank)
        return not any(counts.keys() & self._known[other].needs.counts for other in before)

    def among(self, idle: Sequence[S], has_work: bool) -> Sequence[S]:
        """Those that may compute. Where there is something to, the others wait for their turn."""
        if not has_work:
            self.forget(idle)
            return ()
        found = [worker for worker in idle if self.may_compute(worker)]
        self._waiting.update(dict.fromkeys(worker for worker in idle if worker not in found))
        return found

    def forget(self, workers: Iterable[InstanceSlot]) -> None:
        """There is nothing that these would compute now."""
        for worker in list(workers):
            if worker in self._waiting:
                del self._waiting[worker]
                self._wake()  # what stood behind it may go

    def begin(self, worker: InstanceSlot) -> None:
        known = self._known[worker]
        self._waiting.pop(worker, None)
        self._computing.add(worker)
        self._used.update(known.needs.counts)
        known.n_runs += 1

    def end(self, worker: InstanceSlot) -> None:
        if worker in self._computing:
            self._computing.remove(worker)
            self._used.subtract(self._known[worker].needs.counts)
            self._wake()

    def holding(self, worker: InstanceSlot) -> list[tuple[Any, InferRequest]]:
        """Owners and requests that are computed with resources that it needs."""
        names = self._known[worker].needs.counts.keys()
        found = (other for other in self._computing if names & self._known[other].needs.counts)
        return [(self._known[o].owner, r) for o in found if o.batch is not None for r in o.batch.requests]

    def _limit(self, name: str) -> int:
        if name in self._limits:
            return self._limits[name]
        return max(known.needs.counts.get(name, 0) for known in self._known.values())

    def _wake(self) -> None:
        if self._waiting and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """By rank, then by how long they wait."""
        self._is_woken = False
        for worker in sorted(self._waiting, key=lambda w: self._known[w].rank):
            if worker in self._waiting:
                self._known[worker].owner.on_resources_available()
