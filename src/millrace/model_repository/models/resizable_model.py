"""A `BackendModel` whose instances can change while it serves: a load that changes nothing else makes only these."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from millrace.model_repository.backends.backend import InstanceContext, ModelBackend
from millrace.model_repository.config.model_config import InstanceGroup
from millrace.model_repository.execution.instance_worker import Worker
from millrace.model_repository.models.backend_model import PATIENCE_S, BackendModel
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import ModelVersionSource
from millrace.model_repository.request.status_code import StatusError


class ResizableModel(BackendModel):
    """A model whose instances are added and closed while it answers, in place of a reload."""

    def __init__(
        self, of: ModelVersionSource, backend: ModelBackend, others: BlsExecutor, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(of, backend, others, loop)
        self._of, self._backend, self._others = of, backend, others
        self._leaving: set[Worker] = set()  # that compute, and are closed when they are done

    async def resize(self, groups: Sequence[InstanceGroup]) -> None:
        """Load the instances that these have more, then close those that they have less, once they are idle.

        Instances are alike if their groups differ in name and count alone, as in Triton. Waits for those that are
        closed, but not for longer than PATIENCE_S. raises StatusError, and all is as it was, if one cannot be loaded
        """
        if self._limiter is not None:
            self._limiter.check(groups)
        of = replace(self._of, config=replace(self._of.config, instance_group=tuple(groups)))
        surplus, missing = self._differences(InstanceContext.all_of(of, self._others))
        await self._add([self._worker(self._backend, given) for given in missing])
        self._of, self.config = of, of.config
        for worker in surplus:
            if worker in self._idle or worker.is_lost:
                self._let_go(worker)
            else:
                self._leaving.add(worker)
        self._gives_ahead = self._gives_ahead and len(self._workers) == 1
        self._dispatch(time.monotonic_ns())
        if surplus:
            await asyncio.wait([asyncio.wrap_future(worker.closed) for worker in surplus], timeout=PATIENCE_S)

    def _differences(self, wanted: Sequence[InstanceContext]) -> tuple[list[Worker], list[InstanceContext]]:
        """Instances that are not wanted any more, the newest first, and those that are not there."""
        left = Counter(_kind(given) for given in wanted)
        there = [worker for worker in self._workers if worker not in self._leaving and not worker.is_dead]
        surplus = [worker for worker in self._workers if worker.is_dead]
        for worker in there:
            left[_kind(worker.given)] -= 1
            if left[_kind(worker.given)] < 0:
                surplus.insert(0, worker)
        names, missing = self._free_names(), list[InstanceContext]()
        for given in reversed(wanted):
            if left[_kind(given)] > 0:
                left[_kind(given)] -= 1
                missing.insert(0, given)
        taken = {worker.name for worker in self._workers}
        return surplus, [replace(one, name=next(names)) if one.name in taken else one for one in missing]

    def _free_names(self) -> Iterator[str]:
        taken, number = {worker.name for worker in self._workers}, len(self._workers)
        while True:
            name, number = f"{self.name}_0_{number}", number + 1
            if name not in taken:
                yield name

    async def _add(self, new: Sequence[Worker]) -> None:
        """raises StatusError, and none of them is left, if one cannot be loaded"""
        found = await asyncio.gather(*(asyncio.wrap_future(w.ready) for w in new), return_exceptions=True)
        failed = next((error for error in found if isinstance(error, StatusError)), None)
        if failed is not None:
            for worker in new:
                worker.close()
            raise failed
        for worker in new:
            if self._limiter is not None:
                self._limiter.add(worker, worker.given.group, self)
        self._workers.extend(new)
        self._idle.extend(new)

    def _let_go(self, worker: Worker) -> None:
        """Of one that computes nothing."""
        self._leaving.discard(worker)
        self._workers.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if self._limiter is not None:
            self._limiter.remove([worker])
        worker.close()

    def _free(self, worker: Worker) -> None:
        if worker not in self._leaving:
            super()._free(worker)
            return
        worker.done(self._loop.time())
        if worker.batch is None:
            self._n_busy -= 1
            self._let_go(worker)
            self._dispatch(time.monotonic_ns())
            self._close_if_done()

    def on_worker_restarted(self, worker: Worker) -> None:
        if worker in self._workers:  # otherwise it is being closed
            super().on_worker_restarted(worker)

    def on_worker_lost(self, worker: Worker, why: str) -> None:
        if worker in self._workers:
            super().on_worker_lost(worker, why)


def _kind(given: InstanceContext) -> InstanceGroup:
    """What makes instances alike."""
    return replace(given.group, name="", count=0)
