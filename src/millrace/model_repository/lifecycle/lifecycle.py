"""Lifecycle of served models: loaded and unloaded at start, on request, or by polling the folders.

All versions of a model change together in one step of the event loop: a request gets the old or the new ones, and the
old ones finish their requests before they are unloaded. If a new version fails to load, the old ones stay. A client's
name refers to every model of that name; internally, each model has a `ModelId`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from millrace.model_repository.config.model_config import EnsembleScheduling
from millrace.model_repository.config.problems import Level
from millrace.model_repository.lifecycle.dry_run import diff_load, orphaned_ensembles
from millrace.model_repository.lifecycle.in_place_update import update_in_place
from millrace.model_repository.lifecycle.load_override import Files, LoadOverride, OverrideFolder
from millrace.model_repository.lifecycle.load_source import check_name, config_text, read_for_dry_run, read_for_load
from millrace.model_repository.lifecycle.loader import Loader, LoadFailedError
from millrace.model_repository.lifecycle.model_index import UNLOADED, ModelEntry, ModelIndex, ReadyState, version_of
from millrace.model_repository.lifecycle.model_locks import ModelLocks
from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.file_mtimes import stamps
from millrace.model_repository.repository.model_names import ModelId, resolve_step
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError, invalid

log = logging.getLogger(__name__)
_NOTHING = LoadOverride()


class ModelRepository:
    """The models served by one event loop."""

    def __init__(self, flags: RepositoryFlags, common: RepositoryContext | None = None) -> None:
        """common: None for the defaults without flags"""
        self.flags, self.common, self._folders = flags, common or RepositoryContext(), flags.repositories
        self._entries, self._locks = ModelIndex(), ModelLocks()
        self._requested: set[ModelId] = set()  # requested directly, not only as members of an ensemble
        self._missing: dict[ModelId, str] = {}  # failed at start, with reason, until loaded or unloaded
        self._tasks: set[asyncio.Task[Any]] = set()  # retiring models, loads and the poll
        self.custom = CustomMetrics()
        self._loader = Loader(self, flags.max_model_requests, self.custom)

    # ------------------------------------------------------------------ what there is

    def get(self, name: str, version: int | None = None) -> Model:
        """Return a served version; None: the highest. raises StatusError, also for an ambiguous name"""
        return version_of(self._entries.find(name), name, version)

    def versions(self, name: str) -> list[int]:
        """Return the served versions of a model."""
        entry = self._entries.find(name)
        return sorted(entry.models) if entry is not None else []

    def failed(self) -> Iterator[tuple[ModelId, int]]:
        return self._entries.failed()

    def models(self) -> Iterator[Model]:
        for _, entry in self._entries.items():
            yield from (entry.models[version] for version in sorted(entry.models))

    def named(self, name: str) -> list[ModelId]:
        """Return all models of that name that were ever loaded or tried."""
        return self._entries.named(name)

    def pending_members(self, model_id: ModelId) -> frozenset[ModelId]:
        """Return the members that a loading ensemble waits for."""
        entry = self._entries.get(model_id)
        return (
            frozenset(self._entries.member(model_id, name) for name in entry.pending_members)
            if entry is not None
            else frozenset()
        )

    def is_ready(self) -> bool:
        """Return whether every model that should be loaded is fully ready; unloaded models do not count."""
        return not self.unready_reasons()

    def unready_reasons(self) -> list[str]:
        """Return why the repository is not ready, one line per model."""
        per_model = (
            (model_id, entry.unready_reasons)
            for model_id, entry in self._entries.items()
            if model_id not in self._missing
        )
        return [
            *self._missing.values(),
            *(f"model '{model_id}' {'; '.join(reasons)}" for model_id, reasons in per_model if reasons),
        ]

    async def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Return the repository index: every model in the folders, with the state of each tried version."""
        in_folders = await asyncio.to_thread(self._folders.ids)
        rows: list[dict[str, str]] = []
        for model_id in sorted({*in_folders, *(tried for tried, _ in self._entries.items())}, key=_by_name):
            entry = self._entries.get(model_id)
            for version, (state, reason) in sorted(entry.states.items()) if entry else ():
                model = entry.models.get(version) if entry is not None else None
                if state is ReadyState.READY and model is not None and model.unready_reason:
                    state, reason = state if model.is_ready else ReadyState.UNAVAILABLE, model.unready_reason
                if state is ReadyState.READY or not only_ready:
                    details = {"reason": reason} if reason else {}
                    rows.append({"name": model_id.name, "version": str(version), "state": state.value, **details})
            if (entry is None or not entry.states) and not only_ready:
                rows.append({"name": model_id.name})
        return rows

    # ------------------------------------------------------------------ changes

    async def start(self) -> list[str]:
        """Load the initial models; return failures, one line per model."""
        if self.flags.model_control_mode == "explicit" and "*" not in self.flags.load_model:
            matches = [await asyncio.to_thread(self._folders.named, name) for name in self.flags.load_model]
            ids = [model_id for of_name in matches for model_id in of_name]
        else:
            ids = await asyncio.to_thread(self._folders.ids)
        if self.flags.model_control_mode == "poll":  # before loading: a model that hangs must not stop the poll
            self._in_background(self._poll())
        self._requested.update(ids)
        tried = zip(ids, await asyncio.gather(*map(self._try_load_logged, ids)), strict=True)
        failed = {model_id: str(error) for model_id, error in tried if error is not None}
        self._missing.update(failed)
        return list(failed.values())

    async def load(
        self, name: str, config: Mapping[str, Any] | None = None, files: Files | None = None, *, owner: str = ""
    ) -> None:
        """Load for a client. config: replaces the configuration file. files: replace the folder's files.

        owner: the API key whose models may change; "" for all. raises StatusError
        """
        self._check_mode()
        self._entries.check_owner(name, owner)
        # Shielded: a load interrupted by a client disconnect would leave instances that are never closed.
        text = config_text(name, config, files)
        await asyncio.shield(self._in_background(self._load_requested(name, text, files, owner)))

    async def would_load(self, name: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what `load` would change, in any mode; an ambiguous name lists "models". raises StatusError"""
        check_name(name)
        override = LoadOverride(config_text(name, config, None))
        served = {model_id: entry.highest.config for model_id, entry in self._entries.items() if entry.models}
        reports: list[dict[str, Any]] = []
        for model_id in await asyncio.to_thread(self._folders.named, name):
            file_stamp, read = await asyncio.to_thread(read_for_dry_run, self._folders, model_id, override, served)
            if read is not None and read.is_servable:
                read.problems.extend(orphaned_ensembles(self._entries, model_id, read))
            would = diff_load(name, self._entries.get(model_id), file_stamp, read)
            where = {"namespace": model_id.namespace} if model_id.namespace else {}
            reports.append(
                would | {"ensembles": sorted({str(other) for other in self._entries.ensembles_of(model_id)})} | where
            )
        return reports[0] if len(reports) == 1 else {"name": name, "models": reports}

    async def unload(self, name: str, *, with_members: bool = False, owner: str = "") -> None:
        """Unload for a client; accepted requests are still answered. Dependent ensembles are unloaded, too.

        As in Triton, an unknown name is no error. owner: as for `load`. raises StatusError
        with_members: also unload members that were loaded only for this ensemble
        """
        self._check_mode()
        self._entries.check_owner(name, owner)
        ids = sorted({*self._entries.named(name), *self._locks.named(name)})
        if not any(await asyncio.gather(*(self._unload(model_id, with_members) for model_id in ids))):
            log.warning("nothing to unload: no model %r is there", name)

    async def close(self, within_s: float) -> None:
        """End waiting requests and unload everything, for at most `within_s` seconds."""
        for task in list(self._tasks):
            task.cancel()
        models = list(self.models())
        for model in sorted(models, key=lambda m: not isinstance(m, Ensemble)):  # first those that submit to others
            model.abort()
        self._entries.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(model.retire() for model in models))
        self.common.tracer.close()
        self.common.log.close()

    def _check_mode(self) -> None:
        if self.flags.model_control_mode != "explicit":
            what = "explicit model load / unload is not allowed if polling is enabled"
            raise StatusError(Code.UNAVAILABLE, what)

    async def _load_requested(self, name: str, config: bytes | None, files: Files | None, owner: str) -> None:
        """Load all models of a name. raises StatusError naming each model that cannot be loaded"""
        check_name(name)
        owners = {
            model_id: self._entries[model_id].owner
            for model_id in self._entries.named(name)
            if self._entries[model_id].models
        }
        folder = await asyncio.to_thread(OverrideFolder, name, files) if files else None
        try:
            ids = [ModelId("", name)] if folder else await asyncio.to_thread(self._folders.named, name)
            tried = await asyncio.gather(*(self._try_load(model_id, LoadOverride(config, folder)) for model_id in ids))
        finally:
            if folder is not None:
                folder.release()  # the loaded models hold it now
        loaded = [model_id for model_id, error in zip(ids, tried, strict=True) if error is None]
        self._requested.update(loaded)
        for model_id in loaded:
            self._entries[model_id].owner = owner or owners.get(
                model_id, ""
            )  # an operator's load keeps the model's owner
        failed = [error for error in tried if error is not None]
        if failed:
            raise StatusError(failed[0].code, " ".join(error.message for error in failed))

    async def _unload(self, model_id: ModelId, with_members: bool) -> bool:
        """Unload one model; False if it never existed. raises StatusError"""
        async with self._locks.hold(model_id):
            entry = self._entries.get(model_id)
            if entry is None:
                return False
            members = sorted(self._entries.member(model_id, name) for name in entry.members)
            self._requested.discard(model_id)
            self._remove(model_id)
        for member in members if with_members else ():
            if (
                self._entries.get(member) is not None
                and member not in self._requested
                and not self._entries.ensembles_of(member)
            ):
                await self._unload(member, with_members=True)
        return True

    async def _try_load(self, model_id: ModelId, override: LoadOverride = _NOTHING) -> StatusError | None:
        try:
            await self._load(model_id, override)
        except StatusError as error:
            if model_id in self._missing:
                self._missing[model_id] = str(error)
            return error
        return None

    async def _try_load_logged(self, model_id: ModelId, override: LoadOverride = _NOTHING) -> StatusError | None:
        error = await self._try_load(model_id, override)
        if error is not None:
            log.error("%s", error)
        return error

    async def _load(self, model_id: ModelId, override: LoadOverride = _NOTHING) -> None:
        check_name(model_id.name)
        async with self._locks.hold(model_id):
            file_stamp, read = await asyncio.to_thread(read_for_load, self._folders, model_id, override)
            if await update_in_place(model_id, self._entries.get(model_id), file_stamp, read, override):
                return
            new = await self._new_models(model_id, read, override)
            entry = self._entries.get_or_create(model_id)
            old, entry.models, entry.stamp, entry.pending_members = entry.models, new, file_stamp, frozenset()
            entry.unload_requested, entry.read = False, read
            entry.states = {v: (ReadyState.UNAVAILABLE, UNLOADED) for v in entry.states}
            entry.states.update({v: (ReadyState.READY, "") for v in new})
            self._missing.pop(model_id, None)
            for model in old.values():
                self._in_background(model.retire())
            for what in self.common.unused_settings(read.config) if read is not None else ():
                log.warning("%s: %s", model_id, what)
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
        entry = self._entries.get_or_create(model_id)
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

    # ------------------------------------------------------------------ ensembles

    def _find_step(self, namespace: str, name: str, version: int | None) -> Model:
        """Return the model of an ensemble's step. raises StatusError as `get` does"""
        return version_of(self._entries.find_step(ModelId(namespace, name)), name, version)

    async def _try_members(self, model_id: ModelId, scheduling: EnsembleScheduling, override: LoadOverride) -> None:
        """Load missing members of an ensemble, and wait for members that are loading.

        raises StatusError if a member cannot be loaded or, before waiting, if members depend on this ensemble
        """
        names = sorted({step.model_name for step in scheduling.step})
        in_folders = [await asyncio.to_thread(self._folders.named, name) for name in names]
        there = [{*resolved, *self._entries.present(name)} for resolved, name in zip(in_folders, names, strict=True)]
        resolved = [
            resolve_step(ModelId(model_id.namespace, name), ids) for name, ids in zip(names, there, strict=True)
        ]
        if None in resolved:
            missing = ", ".join(name for name, member in zip(names, resolved, strict=True) if member is None)
            raise invalid(f"ensemble {model_id} contains models that are not available or ambiguous: {missing}")
        members = [member for member in resolved if member is not None]
        self._entries.begin_ensemble_load(model_id, dict(zip(names, members, strict=True)), override)
        self._entries.check_ring(model_id, members)
        for member, error in zip(members, await asyncio.gather(*map(self._try_member, members)), strict=True):
            if error is not None:
                what = f"ensemble '{model_id}' depends on '{member}' which has no loaded version"
                raise invalid(f"{what}. Model '{member}' loading failed with error: {error}")

    async def _try_member(self, model_id: ModelId) -> StatusError | None:
        if model_id in self._locks:
            await self._locks.wait_released(model_id)
            return None
        entry = self._entries.get(model_id)
        return await self._try_load_logged(model_id) if entry is None or not entry.models else None

    def _fit_ensembles(self, member: ModelId) -> None:
        """After a load: load ensembles that wait for the member, and unload those that it no longer fits."""
        needing = self._entries.affected(member)
        for other in needing:
            if member.name in self._entries[other].pending_members and other not in self._locks:
                self._in_background(self._try_load_logged(other, self._entries[other].override))
        for other in needing:
            self._refit(other)

    def _refit(self, model_id: ModelId) -> None:
        """Fit an ensemble to its current members, or unload it."""
        try:
            has_changed = [ensemble.fit() for ensemble in self._entries[model_id].ensembles]
        except StatusError as error:
            log.error("%s: %s", model_id, error)
            self._remove(model_id, str(error))
        else:
            if any(has_changed):  # otherwise ensembles containing it are unaffected
                self._fit_ensembles(model_id)

    def _note(self, model_id: ModelId, versions: Sequence[int], error: StatusError) -> None:
        """Record why nothing is served; if older versions are still served, their state stays."""
        entry = self._entries.get_or_create(model_id)
        if not entry.models:
            entry.states = {version: (ReadyState.UNAVAILABLE, str(error)) for version in versions}
            entry.unload_requested = False

    def _remove(self, model_id: ModelId, reason: str = UNLOADED, unload_requested: bool = False) -> None:
        """Remove a model and its dependent ensembles, which return when it does, or use another of its name.

        unload_requested: the unload was requested, for this model or a member
        """
        unload_requested = unload_requested or reason == UNLOADED
        entry, needing = self._entries[model_id], self._entries.ensembles_of(model_id)
        entry.pending_members = frozenset[str]() if reason == UNLOADED else entry.members
        if reason == UNLOADED:
            self._missing.pop(model_id, None)
            entry.states = {version: (ReadyState.UNAVAILABLE, UNLOADED) for version in entry.states}
        for version, model in entry.models.items():
            entry.states[version] = (ReadyState.UNLOADING, "" if reason == UNLOADED else reason)
            self._in_background(self._retire(entry, version, model, reason))
        entry.models, entry.stamp, entry.unload_requested = {}, None, unload_requested
        for other in needing:
            if self._entries.resolve(ModelId(other.namespace, model_id.name)) not in (model_id, None):
                self._refit(other)
            elif self._entries[other].models:
                self._remove(
                    other, f"ensemble '{other}' depends on '{model_id}' which has no loaded version", unload_requested
                )

    async def _retire(self, entry: ModelEntry, version: int, model: Model, reason: str) -> None:
        await model.retire()
        if version not in entry.models:
            entry.states[version] = (ReadyState.UNAVAILABLE, reason)

    async def _poll(self) -> None:
        """Poll the folders: load changed models and unload removed ones."""
        is_blind = False
        while True:
            await asyncio.sleep(self.flags.repository_poll_secs)
            try:
                file_stamps = await asyncio.to_thread(stamps, self._folders)
            except OSError as error:  # possibly temporary: keep serving
                if not is_blind:
                    log.warning("cannot look at the model repository, and tries again: %s", error)
                is_blind = True
                continue
            is_blind = False
            for model_id, file_stamp in file_stamps.items():
                entry = self._entries.get(model_id)
                if model_id not in self._locks and (entry is None or entry.stamp != file_stamp):
                    self._in_background(self._load_changed(model_id, file_stamp))
            for model_id, entry in self._entries.items():
                is_left = entry.models or model_id in self._missing or entry.unready_reasons
                if model_id not in self._locks and model_id not in file_stamps and is_left:
                    self._remove(model_id)

    async def _load_changed(self, model_id: ModelId, file_stamp: object) -> None:
        await self._try_load_logged(model_id)
        self._entries.get_or_create(model_id).stamp = file_stamp  # tried once, whether it succeeded or not

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log unexpected errors; a StatusError was already reported to the client."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, StatusError):
        log.error("a task of the repository failed", exc_info=error)


def _by_name(model_id: ModelId) -> tuple[str, str]:
    return model_id.name, model_id.namespace
