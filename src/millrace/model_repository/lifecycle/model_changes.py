"""Changes of models, each by its `ModelId`: loads, removals, and ensembles that follow their members.

All versions of a model change together in one step of the event loop: a request gets the old or the new ones, and the
old ones finish their requests before they are unloaded. If a new version fails to load, the old ones stay.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from millrace.model_repository.config.model_config import EnsembleScheduling
from millrace.model_repository.config.problems import Level
from millrace.model_repository.lifecycle.in_place_update import update_in_place
from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.lifecycle.load_source import check_name, read_for_load
from millrace.model_repository.lifecycle.loader import Loader, LoadFailedError
from millrace.model_repository.lifecycle.model_index import UNLOADED, ModelEntry, ModelIndex, ReadyState, version_of
from millrace.model_repository.lifecycle.model_locks import ModelLocks
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.model_names import ModelId, resolve_step
from millrace.model_repository.repository.multi_repository import Repositories
from millrace.model_repository.request.status_code import Code, StatusError, invalid

log = logging.getLogger(__name__)
_NOTHING = LoadOverride()


class ModelChanges:
    """Loads and removes the models of `index`. Everything here runs in one event loop.

    requested: models that were requested directly, not only as members of an ensemble
    missing: models that failed at start, with the reason, until they are loaded or unloaded
    """

    def __init__(self, index: ModelIndex, folders: Repositories, loader: Loader, common: RepositoryContext) -> None:
        self._index, self._folders, self._loader, self._common = index, folders, loader, common
        self.locks = ModelLocks()
        self.requested: set[ModelId] = set()
        self.missing: dict[ModelId, str] = {}
        self.tasks: set[asyncio.Task[Any]] = set()  # retiring models, loads and the poll

    async def try_load(self, model_id: ModelId, override: LoadOverride = _NOTHING) -> StatusError | None:
        try:
            await self.load(model_id, override)
        except StatusError as error:
            if model_id in self.missing:
                self.missing[model_id] = str(error)
            return error
        return None

    async def try_load_logged(self, model_id: ModelId, override: LoadOverride = _NOTHING) -> StatusError | None:
        error = await self.try_load(model_id, override)
        if error is not None:
            log.error("%s", error)
        return error

    async def load(self, model_id: ModelId, override: LoadOverride = _NOTHING) -> None:
        check_name(model_id.name)
        async with self.locks.hold(model_id):
            file_stamp, read = await asyncio.to_thread(read_for_load, self._folders, model_id, override)
            if await update_in_place(model_id, self._index.get(model_id), file_stamp, read, override):
                return
            new = await self._new_models(model_id, read, override)
            entry = self._index.get_or_create(model_id)
            old, entry.models, entry.stamp, entry.pending_members = entry.models, new, file_stamp, frozenset()
            entry.unload_requested, entry.read = False, read
            entry.states = {v: (ReadyState.UNAVAILABLE, UNLOADED) for v in entry.states}
            entry.states.update({v: (ReadyState.READY, "") for v in new})
            self.missing.pop(model_id, None)
            for model in old.values():
                self.in_background(model.retire())
            for message in self._common.unused_settings(read.config) if read is not None else ():
                log.warning("%s: %s", model_id, message)
            log.info("loaded %s, version %s", model_id, ", ".join(map(str, sorted(new))))
            self._fit_ensembles(model_id)

    async def _new_models(
        self, model_id: ModelId, read: repository_reader.ModelFolder | None, override: LoadOverride
    ) -> dict[int, Model]:
        """Load all versions or none. raises StatusError, recorded in the index if nothing is served"""
        if read is None or not read.is_servable:
            problem = next((p for p in read.problems if p.level is Level.ERROR), None) if read else None
            error = StatusError(
                Code.INTERNAL,
                f"failed to load '{model_id}', failed to poll from model repository"
                + (
                    f": {problem.location.removeprefix(f'{read.folder.parent}/')}: {problem.what}"
                    if read and problem
                    else ""
                ),
            )
            if read is not None:
                self._note(model_id, read.served or read.versions, error)
            raise error
        entry = self._index.get_or_create(model_id)
        entry.pending_members = frozenset()
        if not entry.models:
            entry.states.update({version: (ReadyState.LOADING, "") for version in read.served})
        try:
            if read.config.ensemble_scheduling is not None:
                await self._try_members(model_id, read.config.ensemble_scheduling, override)
            return await self._loader.load(model_id, read, override, partial(self._find_step, model_id.namespace))
        except (LoadFailedError, StatusError) as failure:
            failed = failure if isinstance(failure, LoadFailedError) else LoadFailedError(max(read.served), failure)
            self._note(model_id, read.served, failed.error)
            raise failed.to_status_error(model_id) from None
        finally:
            entry.loading = {}

    def _note(self, model_id: ModelId, versions: Sequence[int], error: StatusError) -> None:
        """Record why nothing is served; if older versions are still served, their state stays."""
        entry = self._index.get_or_create(model_id)
        if not entry.models:
            entry.states = {version: (ReadyState.UNAVAILABLE, str(error)) for version in versions}
            entry.unload_requested = False

    async def unload(self, model_id: ModelId, with_members: bool) -> bool:
        """Unload one model; False if it never existed. raises StatusError"""
        async with self.locks.hold(model_id):
            entry = self._index.get(model_id)
            if entry is None:
                return False
            members = sorted(self._index.member(model_id, name) for name in entry.members)
            self.requested.discard(model_id)
            self.remove(model_id)
        for member in members if with_members else ():
            if (
                self._index.get(member) is not None
                and member not in self.requested
                and not self._index.ensembles_of(member)
            ):
                await self.unload(member, with_members=True)
        return True

    def remove(self, model_id: ModelId, reason: str = UNLOADED, unload_requested: bool = False) -> None:
        """Remove a model and its dependent ensembles, which return when it does, or use another of its name.

        unload_requested: the unload was requested, for this model or a member
        """
        unload_requested = unload_requested or reason == UNLOADED
        entry, needing = self._index[model_id], self._index.ensembles_of(model_id)
        entry.pending_members = frozenset[str]() if reason == UNLOADED else entry.members
        if reason == UNLOADED:
            self.missing.pop(model_id, None)
            entry.states = {version: (ReadyState.UNAVAILABLE, UNLOADED) for version in entry.states}
        for version, model in entry.models.items():
            entry.states[version] = (ReadyState.UNLOADING, "" if reason == UNLOADED else reason)
            self.in_background(self._retire(entry, version, model, reason))
        entry.models, entry.stamp, entry.unload_requested = {}, None, unload_requested
        for other in needing:
            if self._index.resolve(ModelId(other.namespace, model_id.name)) not in (model_id, None):
                self._refit(other)
            elif self._index[other].models:
                self.remove(
                    other, f"ensemble '{other}' depends on '{model_id}' which has no loaded version", unload_requested
                )

    async def _retire(self, entry: ModelEntry, version: int, model: Model, reason: str) -> None:
        await model.retire()
        if version not in entry.models:
            entry.states[version] = (ReadyState.UNAVAILABLE, reason)

    # ------------------------------------------------------------------ ensembles

    def _find_step(self, namespace: str, name: str, version: int | None) -> Model:
        """Return the model of an ensemble's step. raises StatusError as `get` does"""
        return version_of(self._index.find_step(ModelId(namespace, name)), name, version)

    async def _try_members(self, model_id: ModelId, scheduling: EnsembleScheduling, override: LoadOverride) -> None:
        """Load missing members of an ensemble, and wait for members that are loading.

        raises StatusError if a member cannot be loaded or, before waiting, if members depend on this ensemble
        """
        names = sorted({step.model_name for step in scheduling.step})
        in_folders = [await asyncio.to_thread(self._folders.find_by_name, name) for name in names]
        present_names = [
            {*resolved, *self._index.present(name)} for resolved, name in zip(in_folders, names, strict=True)
        ]
        resolved = [
            resolve_step(ModelId(model_id.namespace, name), ids) for name, ids in zip(names, present_names, strict=True)
        ]
        if None in resolved:
            missing = ", ".join(name for name, member in zip(names, resolved, strict=True) if member is None)
            raise invalid(f"ensemble {model_id} contains models that are not available or ambiguous: {missing}")
        members = [member for member in resolved if member is not None]
        self._index.begin_ensemble_load(model_id, dict(zip(names, members, strict=True)), override)
        self._index.check_ring(model_id, members)
        for member, error in zip(members, await asyncio.gather(*map(self._try_member, members)), strict=True):
            if error is not None:
                message = f"ensemble '{model_id}' depends on '{member}' which has no loaded version"
                raise invalid(f"{message}. Model '{member}' loading failed with error: {error}")

    async def _try_member(self, model_id: ModelId) -> StatusError | None:
        if model_id in self.locks:
            await self.locks.wait_released(model_id)
            return None
        entry = self._index.get(model_id)
        return await self.try_load_logged(model_id) if entry is None or not entry.models else None

    def _fit_ensembles(self, member: ModelId) -> None:
        """After a load: load ensembles that wait for the member, and unload those that it no longer fits."""
        needing = self._index.affected(member)
        for other in needing:
            if member.name in self._index[other].pending_members and other not in self.locks:
                self.in_background(self.try_load_logged(other, self._index[other].override))
        for other in needing:
            self._refit(other)

    def _refit(self, model_id: ModelId) -> None:
        """Fit an ensemble to its current members, or unload it."""
        try:
            has_changed = [ensemble.fit() for ensemble in self._index[model_id].ensembles]
        except StatusError as error:
            log.error("%s: %s", model_id, error)
            self.remove(model_id, str(error))
        else:
            if any(has_changed):  # otherwise ensembles containing it are unaffected
                self._fit_ensembles(model_id)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(_log_failure)
        return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log unexpected errors; a StatusError was already reported to the client."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, StatusError):
        log.error("a task of the repository failed", exc_info=error)
