"""The rate limiter: instances of all models share counted resources and hold them while they compute.

Among waiting instances, the one with the lowest product of priority and computed batches goes first, so that priority 2
runs half as often as priority 1, as in Triton. Later ones may overtake it if they need none of the resources that it
waits for; so it neither starves nor blocks the others. Everything runs in the event loop.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace.errors import ConfigError
from millrace.model_repository.config.model_config import InstanceGroup
from millrace.model_repository.request.status_code import invalid

FLAG, RESOURCE_FLAG = "--rate-limit", "--rate-limit-resource"
_RESOURCE = re.compile(r"([^:\s]{1,200}):([0-9]{1,9})(?::([0-9]{1,9}))?")


S = TypeVar("S", bound=Hashable)  # an instance


class ResourceWaiter(Protocol):
    """Owner of instances that may wait for resources."""

    def on_resources_available(self) -> None:
        """Handle that a waiting instance may compute now."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources and priority of an instance. counts: by resource name"""

    counts: Mapping[str, int]
    priority: int = 1

    @classmethod
    def from_group(cls, group: InstanceGroup) -> "ResourceRequest":
        limiter = group.rate_limiter
        if limiter is None:
            return cls({})
        return cls({r.name: r.count for r in limiter.resources if r.count}, max(1, limiter.priority))


@dataclass(slots=True)
class _InstanceState:
    needs: ResourceRequest
    owner: ResourceWaiter
    n_runs: int = 0

    @property
    def rank(self) -> int:
        return self.needs.priority * self.n_runs


class InstanceRateLimiter:
    """Rate limiter. limits: configured resource counts; others default to the largest count an instance needs."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        self._states: dict[Hashable, _InstanceState] = {}
        self._used: Counter[str] = Counter()
        self._computing: set[Hashable] = set()
        self._waiting: dict[Hashable, None] = {}
        self._are_global: dict[str, bool] = {}
        self._is_woken = False

    @classmethod
    def from_flags(cls, mode: str, resource_flags: Sequence[str]) -> "InstanceRateLimiter | None":
        """Parse flags of the form NAME:COUNT or NAME:COUNT:DEVICE. raises ConfigError"""
        if mode == "off":
            if resource_flags:
                raise ConfigError(f"{RESOURCE_FLAG} without {FLAG}", f"{FLAG} execution_count", "add it")
            return None
        limits: dict[str, int] = {}
        for flag in resource_flags:
            match = _RESOURCE.fullmatch(flag)
            if match is None:
                raise ConfigError(f"{RESOURCE_FLAG} is {flag!r:.100}", "NAME:COUNT", "write it so, for one memory:4")
            if match[3] is not None and int(match[3]) != 0:
                message = f"{RESOURCE_FLAG} {flag:.100} is about device {match[3]}"
                raise ConfigError(message, "device 0, the CPU: there is no other", "leave the device out")
            if match[1] in limits:
                raise ConfigError(f"{RESOURCE_FLAG} says {match[1]} twice", "once", "leave one out")
            limits[match[1]] = int(match[2])
        return cls(limits)

    def check(self, groups: Iterable[InstanceGroup]) -> None:
        """Check that instances of these groups can ever compute. raises StatusError with Triton's text"""
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

    def add(self, worker: Hashable, group: InstanceGroup, owner: ResourceWaiter) -> None:
        self._states[worker] = _InstanceState(ResourceRequest.from_group(group), owner)

    def remove(self, workers: Iterable[Hashable]) -> None:
        """Remove instances that compute nothing more."""
        for worker in workers:
            self.end(worker)
            self._waiting.pop(worker, None)
            self._states.pop(worker, None)
        self._wake()  # others may have waited behind them
        resource_names = {name for state in self._states.values() for name in state.needs.counts}
        self._are_global = {name: is_global for name, is_global in self._are_global.items() if name in resource_names}

    def may_compute(self, worker: Hashable) -> bool:
        state = self._states[worker]
        counts = state.needs.counts
        if any(self._used[name] + n > self._limit(name) for name, n in counts.items()):
            return False
        before = (other for other in self._waiting if other is not worker and self._states[other].rank < state.rank)
        return not any(counts.keys() & self._states[other].needs.counts for other in before)

    def select_runnable(self, idle: Sequence[S], has_work: bool) -> Sequence[S]:
        """Return the idle instances that may compute; the others wait if there is work."""
        if not has_work:
            self.clear_waiting(idle)
            return ()
        runnable = [worker for worker in idle if self.may_compute(worker)]
        self._waiting.update(dict.fromkeys(worker for worker in idle if worker not in runnable))
        return runnable

    def clear_waiting(self, workers: Iterable[Hashable]) -> None:
        """Stop waiting for instances that have no work now."""
        for worker in list(workers):
            if worker in self._waiting:
                del self._waiting[worker]
                self._wake()  # instances behind it may now run

    def begin(self, worker: Hashable) -> None:
        state = self._states[worker]
        self._waiting.pop(worker, None)
        self._computing.add(worker)
        self._used.update(state.needs.counts)
        state.n_runs += 1

    def end(self, worker: Hashable) -> None:
        if worker in self._computing:
            self._computing.remove(worker)
            self._used.subtract(self._states[worker].needs.counts)
            self._wake()

    def _limit(self, name: str) -> int:
        if name in self._limits:
            return self._limits[name]
        return max(state.needs.counts.get(name, 0) for state in self._states.values())

    def _wake(self) -> None:
        if self._waiting and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Notify owners by rank, then by waiting time."""
        self._is_woken = False
        for worker in sorted(self._waiting, key=lambda w: self._states[w].rank):
            if worker in self._waiting:
                self._states[worker].owner.on_resources_available()
