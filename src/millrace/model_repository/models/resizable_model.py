"""A `BackendModel` whose instance count can change in place, for a load that changes nothing else."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from millrace.model_repository.backends.backend import InstanceContext, ModelBackend
from millrace.model_repository.config.model_config import InstanceGroup
from millrace.model_repository.execution.instance_worker import InstanceWorker
from millrace.model_repository.models.backend_model import STUCK_WARNING_S, BackendModel
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import ModelVersionSource
from millrace.model_repository.request.status_code import StatusError


class ResizableModel(BackendModel):
    """A model whose instances are added and closed while it serves, instead of a reload."""

    def __init__(
        self, source: ModelVersionSource, backend: ModelBackend, bls: BlsExecutor, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(source, backend, bls, loop)
        self._source, self._backend, self._bls = source, backend, bls
        self._leaving: set[InstanceWorker] = set()  # busy workers that are closed once they finish

    async def resize(self, groups: Sequence[InstanceGroup]) -> None:
        """Load the instances that these groups add, then close those that they remove once they are idle.

        Instances are alike if their groups differ in name and count alone, as in Triton. Waits for those that are
        closed, but not for longer than STUCK_WARNING_S.
        raises StatusError, and all is as it was, if one cannot be loaded
        """
        if self._limiter is not None:
            self._limiter.check(groups)
        source = replace(self._source, config=replace(self._source.config, instance_group=tuple(groups)))
        surplus, missing = self._differences(InstanceContext.for_groups(source, self._bls))
        await self._add([self._worker(self._backend, context) for context in missing])
        self._source, self.config = source, source.config
        for worker in surplus:
            if worker in self._idle or worker.is_lost:
                self._close_idle(worker)
            else:
                self._leaving.add(worker)
        self._gives_ahead = self._gives_ahead and len(self._workers) == 1
        self._dispatch(time.monotonic_ns())
        if surplus:
            await asyncio.wait([asyncio.wrap_future(worker.closed) for worker in surplus], timeout=STUCK_WARNING_S)

    def _differences(self, contexts: Sequence[InstanceContext]) -> tuple[list[InstanceWorker], list[InstanceContext]]:
        """Return surplus workers, the newest first, and the contexts of missing instances."""
        left = Counter(map(_kind, contexts))
        staying = [worker for worker in self._workers if worker not in self._leaving and not worker.is_abandoned]
        surplus = [worker for worker in self._workers if worker.is_abandoned]
        for worker in staying:
            left[_kind(worker.context)] -= 1
            if left[_kind(worker.context)] < 0:
                surplus.insert(0, worker)
        names, missing = self._free_names(), list[InstanceContext]()
        for context in reversed(contexts):
            if left[_kind(context)] > 0:
                left[_kind(context)] -= 1
                missing.insert(0, context)
        used_names = {worker.name for worker in self._workers}
        return surplus, [replace(one, name=next(names)) if one.name in used_names else one for one in missing]

    def _free_names(self) -> Iterator[str]:
        used_names, number = {worker.name for worker in self._workers}, len(self._workers)
        while True:
            name, number = f"{self.name}_0_{number}", number + 1
            if name not in used_names:
                yield name

    async def _add(self, new: Sequence[InstanceWorker]) -> None:
        """Add loaded workers. raises StatusError, after closing all of them, if one fails to load"""
        outcomes = await asyncio.gather(*(asyncio.wrap_future(w.ready) for w in new), return_exceptions=True)
        failed = next((error for error in outcomes if isinstance(error, StatusError)), None)
        if failed is not None:
            for worker in new:
                worker.close()
            raise failed
        for worker in new:
            if self._limiter is not None:
                self._limiter.add(worker, worker.context.group, self)
        self._workers.extend(new)
        self._idle.extend(new)

    def _close_idle(self, worker: InstanceWorker) -> None:
        """Close and remove an idle worker."""
        self._leaving.discard(worker)
        self._workers.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if self._limiter is not None:
            self._limiter.remove([worker])
        worker.close()

    def _free(self, worker: InstanceWorker) -> None:
        if worker not in self._leaving:
            super()._free(worker)
            return
        worker.done(self._loop.time())
        if worker.batch is None:
            self._n_busy -= 1
            self._close_idle(worker)
            self._dispatch(time.monotonic_ns())
            self._close_if_done()

    def on_worker_restarted(self, worker: InstanceWorker) -> None:
        if worker in self._workers:  # otherwise it is closing
            super().on_worker_restarted(worker)

    def on_worker_lost(self, worker: InstanceWorker, reason: str) -> None:
        if worker in self._workers:
            super().on_worker_lost(worker, reason)


def _kind(context: InstanceContext) -> InstanceGroup:
    """Return the group without its name and count: instances with equal results are interchangeable."""
    return replace(context.group, name="", count=0)
