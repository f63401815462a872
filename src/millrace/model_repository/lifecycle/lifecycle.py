"""Which models are served: loaded and unloaded, by request, by what the folders say, or once.

A model's versions change together, in one moment of the event loop: whoever asks gets the old ones or the new ones, and
the old ones answer what they have taken before they are unloaded. Where a new one cannot be loaded, the old ones stay.
A client says a name, and means every model of that name; inside, each is known by its `ModelId`.
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
from millrace.model_repository.lifecycle.in_place_update import changed_in_place
from millrace.model_repository.lifecycle.load_override import Files, LoadOverride, OverrideFolder
from millrace.model_repository.lifecycle.load_source import check_name, config_text, read_for_dry_run, read_for_load
from millrace.model_repository.lifecycle.loader import Loader, LoadFailedError
from millrace.model_repository.lifecycle.model_index import UNLOADED, Entries, Entry, State, version_of
from millrace.model_repository.lifecycle.model_locks import ModelLocks
from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.file_mtimes import stamps
from millrace.model_repository.repository.model_names import ModelId, chosen
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError, invalid

log = logging.getLogger(__name__)
_NOTHING = LoadOverride()


class ModelRepository:
    """Of the event loop in which it is made."""

    def __init__(self, flags: RepositoryFlags, common: RepositoryContext | None = None) -> None:
        """common: None is what is there without a flag"""
        self.flags, self.common, self._folders = flags, common or RepositoryContext(), flags.repositories
        self._entries, self._turns = Entries(), ModelLocks()
        self._asked: set[ModelId] = set()  # that somebody wants for themselves, and not as members of an ensemble
        self._missing: dict[ModelId, str] = {}  # that failed at the start, and why, until they are loaded or unloaded
        self._tasks: set[asyncio.Task[Any]] = set()  # of models that are on their way out, and of the poll
        self.custom = CustomMetrics()
        self._loader = Loader(self, flags.max_model_requests, self.custom)

    # ------------------------------------------------------------------ what there is

    def get(self, name: str, version: int | None = None) -> Model:
        """None: the highest version. raises StatusError, also where the name is that of several"""
        return version_of(self._entries.find(name), name, version)

    def versions(self, name: str) -> list[int]:
        """Of a model that `get` found."""
        entry = self._entries.find(name)
        return sorted(entry.models) if entry is not None else []

    def failed(self) -> Iterator[tuple[ModelId, int]]:
        return self._entries.failed()

    def models(self) -> Iterator[Model]:
        for _, entry in self._entries.items():
            yield from (entry.models[version] for version in sorted(entry.models))

    def named(self, name: str) -> list[ModelId]:
        """Those that were ever tried."""
        return self._entries.named(name)

    def loads_behind(self, one: ModelId) -> frozenset[ModelId]:
        """Members that an ensemble which is being loaded waits for."""
        entry = self._entries.get(one)
        return frozenset(self._entries.member(one, name) for name in entry.wanted) if entry is not None else frozenset()

    def is_ready(self) -> bool:
        """Every model that was to be loaded is, whole; one that is on its way out by wish is not missed."""
        return not self.troubles()

    def troubles(self) -> list[str]:
        """Why it is not ready now, a line a model."""
        others = ((one, entry.troubles) for one, entry in self._entries.items() if one not in self._missing)
        return [*self._missing.values(), *(f"model '{one}' {'; '.join(found)}" for one, found in others if found)]

    async def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Every model of the folders, with the state of each version that was tried."""
        in_folders = await asyncio.to_thread(self._folders.ids)
        found: list[dict[str, str]] = []
        for one in sorted({*in_folders, *(tried for tried, _ in self._entries.items())}, key=_by_name):
            entry = self._entries.get(one)
            for version, (state, reason) in sorted(entry.states.items()) if entry else ():
                model = entry.models.get(version) if entry is not None else None
                if state is State.READY and model is not None and model.unready_reason:
                    state, reason = state if model.is_ready else State.UNAVAILABLE, model.unready_reason
                if state is State.READY or not only_ready:
                    why = {"reason": reason} if reason else {}
                    found.append({"name": one.name, "version": str(version), "state": state.value, **why})
            if (entry is None or not entry.states) and not only_ready:
                found.append({"name": one.name})
        return found

    # ------------------------------------------------------------------ changes

    async def start(self) -> list[str]:
        """Load what is to be there from the start; what went wrong, a line a model."""
        if self.flags.model_control_mode == "explicit" and "*" not in self.flags.load_model:
            found = [await asyncio.to_thread(self._folders.named, name) for name in self.flags.load_model]
            ids = [one for of_name in found for one in of_name]
        else:
            ids = await asyncio.to_thread(self._folders.ids)
        if self.flags.model_control_mode == "poll":  # now: one that hangs must not keep the others from changing
            self._in_background(self._poll())
        self._asked.update(ids)
        tried = zip(ids, await asyncio.gather(*map(self._tried, ids)), strict=True)
        failed = {one: str(error) for one, error in tried if error is not None}
        self._missing.update(failed)
        return list(failed.values())

    async def load(
        self, name: str, config: Mapping[str, Any] | None = None, files: Files | None = None, *, owner: str = ""
    ) -> None:
        """By a client. config: in place of its file's. files: of all its folder, as `OverrideFolder` has them.

        owner: the API key whose models may be changed; "" for all of them. raises StatusError
        """
        self._check_mode()
        self._entries.check_owner(name, owner)
        # Whoever asked may go away: a load that is cut off in the middle would leave instances that nobody closes.
        given = config_text(name, config, files)
        await asyncio.shield(self._in_background(self._load_asked(name, given, files, owner)))

    async def would_load(self, name: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What `load` would change, in any mode; of a name of several, under "models" of each. raises StatusError"""
        check_name(name)
        given = LoadOverride(config_text(name, config, None))
        served = {one: entry.highest.config for one, entry in self._entries.items() if entry.models}
        told: list[dict[str, Any]] = []
        for one in await asyncio.to_thread(self._folders.named, name):
            of_files, read = await asyncio.to_thread(read_for_dry_run, self._folders, one, given, served)
            if read is not None and read.is_servable:
                read.problems.extend(orphaned_ensembles(self._entries, one, read))
            would = diff_load(name, self._entries.get(one), of_files, read)
            where = {"namespace": one.namespace} if one.namespace else {}
            told.append(would | {"ensembles": sorted({str(other) for other in self._entries.made_of(one)})} | where)
        return told[0] if len(told) == 1 else {"name": name, "models": told}

    async def unload(self, name: str, *, with_members: bool = False, owner: str = "") -> None:
        """By a client; requests that it has taken are still answered. Ensembles that need it go with it.

        As in Triton it is no error that nothing of that name is there. owner: as for `load`. raises StatusError
        with_members: also those of an ensemble that were loaded for it alone
        """
        self._check_mode()
        self._entries.check_owner(name, owner)
        ids = sorted({*self._entries.named(name), *self._turns.named(name)})
        if not any(await asyncio.gather(*(self._unload(one, with_members) for one in ids))):
            log.warning("nothing to unload: no model %r is there", name)

    async def close(self, within_s: float) -> None:
        """End what waits, unload everything; what takes longer is left behind."""
        for task in list(self._tasks):
            task.cancel()
        models = list(self.models())
        for model in sorted(models, key=lambda m: not isinstance(m, Ensemble)):  # first what would ask others
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

    async def _load_asked(self, name: str, config: bytes | None, files: Files | None, owner: str) -> None:
        """raises StatusError, of each model of that name that cannot be loaded"""
        check_name(name)
        owners = {one: self._entries[one].owner for one in self._entries.named(name) if self._entries[one].models}
        folder = await asyncio.to_thread(OverrideFolder, name, files) if files else None
        try:
            ids = [ModelId("", name)] if folder else await asyncio.to_thread(self._folders.named, name)
            tried = await asyncio.gather(*(self._attempted(one, LoadOverride(config, folder)) for one in ids))
        finally:
            if folder is not None:
                folder.release()  # its models hold it
        loaded = [one for one, error in zip(ids, tried, strict=True) if error is None]
        self._asked.update(loaded)
        for one in loaded:
            self._entries[one].owner = owner or owners.get(one, "")  # an operator's load takes no model from its key
        failed = [error for error in tried if error is not None]
        if failed:
            raise StatusError(failed[0].code, " ".join(error.message for error in failed))

    async def _unload(self, one: ModelId, with_members: bool) -> bool:
        """False: it was never there; perhaps a load that was under way found none. raises StatusError"""
        async with self._turns.of(one):
            entry = self._entries.get(one)
            if entry is None:
                return False
            members = sorted(self._entries.member(one, name) for name in entry.members)
            self._asked.discard(one)
            self._remove(one)
        for member in members if with_members else ():
            if (
                self._entries.get(member) is not None
                and member not in self._asked
                and not self._entries.made_of(member)
            ):
                await self._unload(member, with_members=True)
        return True

    async def _attempted(self, one: ModelId, given: LoadOverride = _NOTHING) -> StatusError | None:
        try:
            await self._load(one, given)
        except StatusError as error:
            if one in self._missing:
                self._missing[one] = str(error)
            return error
        return None

    async def _tried(self, one: ModelId, given: LoadOverride = _NOTHING) -> StatusError | None:
        error = await self._attempted(one, given)
        if error is not None:
            log.error("%s", error)
        return error

    async def _load(self, one: ModelId, given: LoadOverride = _NOTHING) -> None:
        check_name(one.name)
        async with self._turns.of(one):
            of_files, read = await asyncio.to_thread(read_for_load, self._folders, one, given)
            if await changed_in_place(one, self._entries.get(one), of_files, read, given):
                return
            new = await self._new_models(one, read, given)
            entry = self._entries.made(one)
            old, entry.models, entry.stamp, entry.wanted = entry.models, new, of_files, frozenset()
            entry.is_by_wish, entry.read = False, read
            entry.states = {v: (State.UNAVAILABLE, UNLOADED) for v in entry.states}
            entry.states.update({v: (State.READY, "") for v in new})
            self._missing.pop(one, None)
            for model in old.values():
                self._in_background(model.retire())
            for what in self.common.unused(read.config) if read is not None else ():
                log.warning("%s: %s", one, what)
            log.info("loaded %s, version %s", one, ", ".join(map(str, sorted(new))))
            self._fit_ensembles(one)

    async def _new_models(
        self, one: ModelId, read: repository_reader.Model | None, given: LoadOverride
    ) -> dict[int, Model]:
        """All of its versions, loaded, or none. raises StatusError, and the index says why where nothing is served"""
        if read is None or not read.is_servable:
            why = next((p for p in read.problems if p.level is Level.ERROR), None) if read else None
            error = StatusError(
                Code.INTERNAL,
                f"failed to load '{one}', failed to poll from model repository"
                + (f": {why.where.removeprefix(f'{read.folder.parent}/')}: {why.what}" if read and why else ""),
            )
            if read is not None:
                self._note(one, read.served or read.versions, error)
            raise error
        entry = self._entries.made(one)
        entry.wanted = frozenset()
        if not entry.models:
            entry.states.update({version: (State.LOADING, "") for version in read.served})
        try:
            if read.config.ensemble_scheduling is not None:
                await self._try_members(one, read.config.ensemble_scheduling, given)
            return await self._loader.loaded(one, read, given, partial(self._step, one.namespace))
        except (LoadFailedError, StatusError) as found:
            failed = found if isinstance(found, LoadFailedError) else LoadFailedError(max(read.served), found)
            self._note(one, read.served, failed.error)
            raise failed.told(one) from None
        finally:
            entry.loading = {}

    # ------------------------------------------------------------------ ensembles

    def _step(self, namespace: str, name: str, version: int | None) -> Model:
        """Of an ensemble of that namespace. raises StatusError as `get` does"""
        return version_of(self._entries.step(ModelId(namespace, name)), name, version)

    async def _try_members(self, one: ModelId, scheduling: EnsembleScheduling, given: LoadOverride) -> None:
        """Load those that are not there, wait for those on their way.

        raises StatusError where one cannot be loaded, and in a ring, before it waits
        """
        names = sorted({step.model_name for step in scheduling.step})
        in_folders = [await asyncio.to_thread(self._folders.named, name) for name in names]
        there = [{*found, *self._entries.present(name)} for found, name in zip(in_folders, names, strict=True)]
        found = [chosen(ModelId(one.namespace, name), ids) for name, ids in zip(names, there, strict=True)]
        if None in found:
            missing = ", ".join(name for name, member in zip(names, found, strict=True) if member is None)
            raise invalid(f"ensemble {one} contains models that are not available or ambiguous: {missing}")
        members = [member for member in found if member is not None]
        self._entries.need(one, dict(zip(names, members, strict=True)), given)
        self._entries.check_ring(one, members)
        for member, error in zip(members, await asyncio.gather(*map(self._try_member, members)), strict=True):
            if error is not None:
                what = f"ensemble '{one}' depends on '{member}' which has no loaded version"
                raise invalid(f"{what}. Model '{member}' loading failed with error: {error}")

    async def _try_member(self, one: ModelId) -> StatusError | None:
        if one in self._turns:
            await self._turns.over(one)
            return None
        entry = self._entries.get(one)
        return await self._tried(one) if entry is None or not entry.models else None

    def _fit_ensembles(self, member: ModelId) -> None:
        """It was loaded anew: those that wait for it are loaded, those that it fits no more are unloaded."""
        needing = self._entries.affected(member)
        for other in needing:
            if member.name in self._entries[other].wanted and other not in self._turns:
                self._in_background(self._tried(other, self._entries[other].given))
        for other in needing:
            self._fit(other)

    def _fit(self, one: ModelId) -> None:
        """An ensemble, to its members as they are now."""
        try:
            has_changed = [ensemble.fit() for ensemble in self._entries[one].ensembles]
        except StatusError as error:
            log.error("%s: %s", one, error)
            self._remove(one, str(error))
        else:
            if any(has_changed):  # otherwise those that are made of it see what they saw
                self._fit_ensembles(one)

    def _note(self, one: ModelId, versions: Sequence[int], error: StatusError) -> None:
        """Why nothing is served; where an older one still is, its state stays what it was."""
        entry = self._entries.made(one)
        if not entry.models:
            entry.states = {version: (State.UNAVAILABLE, str(error)) for version in versions}
            entry.is_by_wish = False

    def _remove(self, one: ModelId, reason: str = UNLOADED, is_by_wish: bool = False) -> None:
        """With the ensembles that need it, which come back when it does, or take another one of its name.

        is_by_wish: somebody unloaded a model that it is made of
        """
        is_by_wish = is_by_wish or reason == UNLOADED
        entry, needing = self._entries[one], self._entries.made_of(one)
        entry.wanted = frozenset[str]() if reason == UNLOADED else entry.members
        if reason == UNLOADED:
            self._missing.pop(one, None)
            entry.states = {version: (State.UNAVAILABLE, UNLOADED) for version in entry.states}
        for version, model in entry.models.items():
            entry.states[version] = (State.UNLOADING, "" if reason == UNLOADED else reason)
            self._in_background(self._retired(entry, version, model, reason))
        entry.models, entry.stamp, entry.is_by_wish = {}, None, is_by_wish
        for other in needing:
            if self._entries.meant(ModelId(other.namespace, one.name)) not in (one, None):
                self._fit(other)
            elif self._entries[other].models:
                self._remove(other, f"ensemble '{other}' depends on '{one}' which has no loaded version", is_by_wish)

    async def _retired(self, entry: Entry, version: int, model: Model, reason: str) -> None:
        await model.retire()
        if version not in entry.models:
            entry.states[version] = (State.UNAVAILABLE, reason)

    async def _poll(self) -> None:
        """Look at the folders again and again; what changed is loaded, what is gone is unloaded."""
        is_blind = False
        while True:
            await asyncio.sleep(self.flags.repository_poll_secs)
            try:
                found = await asyncio.to_thread(stamps, self._folders)
            except OSError as error:  # away for a moment, perhaps: what is served stays
                if not is_blind:
                    log.warning("cannot look at the model repository, and tries again: %s", error)
                is_blind = True
                continue
            is_blind = False
            for one, of_files in found.items():
                entry = self._entries.get(one)
                if one not in self._turns and (entry is None or entry.stamp != of_files):
                    self._in_background(self._followed(one, of_files))
            for one, entry in self._entries.items():
                is_left = entry.models or one in self._missing or entry.troubles
                if one not in self._turns and one not in found and is_left:
                    self._remove(one)

    async def _followed(self, one: ModelId, of_files: object) -> None:
        await self._tried(one)
        self._entries.made(one).stamp = of_files  # tried once, whatever came of it

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_tell_of)
        return task


def _tell_of(task: asyncio.Task[Any]) -> None:
    """Log what nobody expects; a StatusError was told to the client, if it is still there."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, StatusError):
        log.error("a task of the repository failed", exc_info=error)


def _by_name(one: ModelId) -> tuple[str, str]:
    return one.name, one.namespace
