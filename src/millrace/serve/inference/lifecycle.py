"""Which models are served: loaded and unloaded, by request, by what the folders say, or once.

A model's versions change together, in one moment of the event loop: whoever asks gets the old ones or the new ones, and
the old ones answer what they have taken before they are unloaded. Where a new one cannot be loaded, the old ones stay.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from millrace.serve.inference.backend_model import BackendModel
from millrace.serve.inference.backends import backend_named
from millrace.serve.inference.brought import Brought, BroughtFolder, Files
from millrace.serve.inference.common import Common
from millrace.serve.inference.custom_metrics import CustomMetrics
from millrace.serve.inference.dry_run import what_would_change
from millrace.serve.inference.ensemble import Ensemble
from millrace.serve.inference.entries import UNLOADED, Entry, State, Turns
from millrace.serve.inference.flags import RepositoryFlags
from millrace.serve.inference.instances import in_own_thread
from millrace.serve.inference.model import Loadable, Model
from millrace.serve.inference.others import Others
from millrace.serve.inference.reading import check_name, config_text, read_now, read_to_tell
from millrace.serve.inference.sequence_model import SequenceModel
from millrace.serve.inference.states import States
from millrace.serve.inference.status import Code, StatusError, invalid
from millrace.serve.repository import folders
from millrace.serve.repository.config import EnsembleScheduling
from millrace.serve.repository.problems import Level
from millrace.serve.repository.stamps import stamps

log = logging.getLogger(__name__)
_NOTHING = Brought()
_MOST_CHANGES = 16  # of one model that wait for their turn
_CODE_NAMES = {Code.INVALID_ARG: "Invalid argument", Code.NOT_FOUND: "Not found", Code.UNSUPPORTED: "Unsupported"}


class ModelRepository:
    """Of the event loop in which it is made."""

    def __init__(self, flags: RepositoryFlags, common: Common | None = None) -> None:
        """common: None is what is there without a flag"""
        self.flags, self.common = flags, common or Common()
        self._entries: dict[str, Entry] = {}
        self._turns: dict[str, Turns] = {}  # of the models that are being changed
        self._asked: set[str] = set()  # models that somebody wants for themselves, and not as members of an ensemble
        self._missing: set[str] = set()  # that failed at the start, until they are loaded or unloaded
        self._tasks: set[asyncio.Task[None]] = set()  # of models that are on their way out, and of the poll
        self._others: Others | None = None  # by which models ask models
        self.custom = CustomMetrics()

    # ------------------------------------------------------------------ what there is

    def get(self, name: str, version: int | None = None) -> Model:
        """None: the highest version. raises StatusError"""
        entry = self._entries.get(name)
        if entry is None:
            raise _unknown(f"'{name}' is not found")
        if version is None:
            if not entry.models:
                raise _unknown(f"'{name}' has no available versions")
            return entry.models[max(entry.models)]
        if version in entry.models:
            return entry.models[version]
        if version in entry.states:
            raise _unknown(f"'{name}' version {version} is not at ready state", Code.UNAVAILABLE)
        raise _unknown(f"'{name}' version {version} is not found")

    def versions(self, name: str) -> list[int]:
        return sorted(self._entries[name].models)

    def models(self) -> Iterator[Model]:
        for _, entry in sorted(self._entries.items()):
            yield from (entry.models[version] for version in sorted(entry.models))

    def loads_behind(self, name: str) -> frozenset[str]:
        """Members that an ensemble which is being loaded waits for."""
        return self._entries[name].wanted if name in self._entries else frozenset()

    def is_ready(self) -> bool:
        """Every model that was to be loaded is, whole; one that is on its way out by wish is not missed."""
        return not self._missing and all(entry.is_as_wished for entry in self._entries.values())

    async def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Every model of the folders, with the state of each version that was tried."""
        names = await asyncio.to_thread(folders.model_names, self.flags.roots)
        found: list[dict[str, str]] = []
        for name in sorted({*names, *self._entries}):
            entry = self._entries.get(name)
            for version, (state, reason) in sorted(entry.states.items()) if entry else ():
                model = entry.models.get(version) if entry is not None else None
                if state is State.READY and model is not None and model.troubles:
                    state, reason = state if model.is_ready else State.UNAVAILABLE, model.troubles
                if state is State.READY or not only_ready:
                    why = {"reason": reason} if reason else {}
                    found.append({"name": name, "version": str(version), "state": state.value, **why})
            if (entry is None or not entry.states) and not only_ready:
                found.append({"name": name})
        return found

    # ------------------------------------------------------------------ changes

    async def start(self) -> list[str]:
        """Load what is to be there from the start; what went wrong, a line a model."""
        names = await asyncio.to_thread(folders.model_names, self.flags.roots)
        if self.flags.model_control_mode == "explicit" and "*" not in self.flags.load_model:
            names = list(self.flags.load_model)
        if self.flags.model_control_mode == "poll":  # now: one that hangs must not keep the others from changing
            self._in_background(self._poll())
        self._asked.update(names)
        tried = zip(names, await asyncio.gather(*map(self._tried, names)), strict=True)
        failed = {name: str(error) for name, error in tried if error is not None}
        self._missing.update(failed)
        return list(failed.values())

    async def load(self, name: str, config: Mapping[str, Any] | None = None, files: Files | None = None) -> None:
        """By a client. config: in place of its file's. files: of all its folder, as `BroughtFolder` has them.

        raises StatusError
        """
        self._check_mode()
        # Whoever asked may go away: a load that is cut off in the middle would leave instances that nobody closes.
        given = config_text(name, config, files)
        await asyncio.shield(self._in_background(self._load_asked(name, given, files)))

    async def would_load(self, name: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What `load` would change, in any mode. raises StatusError"""
        check_name(name)
        given = Brought(config_text(name, config, None))
        served = {of_one for of_one, entry in self._entries.items() if entry.models}
        of_files, read = await asyncio.to_thread(read_to_tell, self.flags, name, given, served)
        told = what_would_change(name, self._entries.get(name), of_files, read)
        return told | {"ensembles": sorted(self._made_of(name))}

    async def unload(self, name: str, *, with_members: bool = False) -> None:
        """By a client; requests that it has taken are still answered. Ensembles that need it go with it.

        with_members: also those of an ensemble that were loaded for it alone. raises StatusError
        """
        self._check_mode()
        if name not in self._entries and name not in self._turns:
            raise _unknown(f"'{name}' is not found")
        async with self._turn(name):
            if name not in self._entries:
                raise _unknown(f"'{name}' is not found")
            members = self._entries[name].members
            self._asked.discard(name)
            self._remove(name)
        for member in sorted(members) if with_members else ():
            if member in self._entries and member not in self._asked and not self._made_of(member):
                await self.unload(member, with_members=True)

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

    async def _load_asked(self, name: str, config: bytes | None, files: Files | None) -> None:
        check_name(name)
        folder = await asyncio.to_thread(BroughtFolder, name, files) if files else None
        try:
            await self._load(name, Brought(config, folder))
        finally:
            if folder is not None:
                folder.release()  # its models hold it
        self._asked.add(name)

    async def _tried(self, name: str, given: Brought = _NOTHING) -> StatusError | None:
        try:
            await self._load(name, given)
        except StatusError as error:
            log.error("%s", error)
            return error
        return None

    async def _load(self, name: str, given: Brought = _NOTHING) -> None:
        check_name(name)
        async with self._turn(name):
            of_files, read = await asyncio.to_thread(read_now, self.flags, name, given)
            new = await self._new_models(name, read, given)
            entry = self._entries.setdefault(name, Entry())
            old, entry.models, entry.stamp, entry.wanted = entry.models, new, of_files, frozenset()
            entry.read = read
            entry.states = {v: (State.UNAVAILABLE, UNLOADED) for v in entry.states}
            entry.states.update({v: (State.READY, "") for v in new})
            self._missing.discard(name)
            for model in old.values():
                self._in_background(model.retire())
            for what in self.common.unused(read.config) if read is not None else ():
                log.warning("%s: %s", name, what)
            log.info("loaded %s, version %s", name, ", ".join(map(str, sorted(new))))
            self._fit_ensembles(name)

    async def _new_models(self, name: str, read: folders.Model | None, given: Brought) -> dict[int, Model]:
        """All of its versions, loaded, or none. raises StatusError, and the index says why where nothing is served"""
        if read is None or not read.is_servable:
            why = next((p for p in read.problems if p.level is Level.ERROR), None) if read else None
            error = StatusError(
                Code.INTERNAL,
                f"failed to load '{name}', failed to poll from model repository"
                + (f": {why.where.removeprefix(f'{read.folder.parent}/')}: {why.what}" if read and why else ""),
            )
            if read is not None:
                self._note(name, read.served or read.versions, error)
            raise error
        entry = self._entries.setdefault(name, Entry())
        entry.wanted = frozenset()
        if not entry.models:
            entry.states.update({version: (State.LOADING, "") for version in read.served})
        loading: dict[int, Model] = {}
        version = max(read.served)
        try:
            if read.config.ensemble_scheduling is not None:
                await self._try_members(name, read.config.ensemble_scheduling, given)
            made = await self._maker(read)
            for version in read.served:
                loading[version] = made(version)
                if given.folder is not None:
                    loading[version].keep(given.folder)
                await loading[version].loaded()
        except StatusError as failed:
            await asyncio.gather(*(model.retire() for model in loading.values()))
            word = _CODE_NAMES.get(failed.code, failed.code.name.capitalize())
            self._note(name, read.served, failed)
            what = f"load failed for model '{name}': version {version} is at UNAVAILABLE state: {word}: {failed};"
            raise StatusError(Code.INTERNAL, what) from None
        return loading

    async def _maker(self, read: folders.Model) -> Callable[[int], Model]:
        """What makes a version of it, which begins to load. raises StatusError"""
        loop, name, config = asyncio.get_running_loop(), read.name, read.config

        def found(version: int) -> Loadable:
            most = self.flags.max_model_requests
            return Loadable(name, version, config, read.folder, read.labels, most, self.common)

        if config.ensemble_scheduling is not None:
            return lambda version: Ensemble(found(version), self.get, loop)
        backend = backend_named(config.backend)
        if (config.batch_input or config.batch_output) and not backend.takes_batch_io:
            what = f"batch_input and batch_output are not taken by backend '{config.backend}'"
            raise StatusError(Code.UNSUPPORTED, what)
        config = await in_own_thread(name, partial(backend.completed, config, read.folder))
        self._others = others = self._others or Others(self, self.custom, loop)
        if config.sequence_batching is None or config.sequence_batching.iterative_sequence:
            return lambda version: BackendModel(found(version), backend, others, loop)
        states = await asyncio.to_thread(States, config, read.folder)
        return lambda version: SequenceModel(found(version), backend, others, loop, states)

    # ------------------------------------------------------------------ ensembles

    async def _try_members(self, name: str, scheduling: EnsembleScheduling, given: Brought) -> None:
        """Load those that are not there, wait for those on their way.

        raises StatusError where one cannot be loaded, and in a ring, before it waits
        """
        entry = self._entries[name]
        entry.wanted, entry.given = frozenset(step.model_name for step in scheduling.step), given
        seen, left = set[str](), [(member, name) for member in entry.wanted]
        while left:
            member, by = left.pop()
            if member == name:
                raise invalid(f"circular dependency between ensembles: {name} -> ... -> {by} -> {name}")
            if member in self._entries and member not in seen:
                seen.add(member)
                left.extend((m, member) for m in self._entries[member].members)
        members = sorted(entry.wanted)
        for member, error in zip(members, await asyncio.gather(*map(self._try_member, members)), strict=True):
            if error is not None:
                what = f"ensemble '{name}' depends on '{member}' which has no loaded version"
                raise invalid(f"{what}. Model '{member}' loading failed with error: {error}")

    async def _try_member(self, name: str) -> StatusError | None:
        turns = self._turns.get(name)
        if turns is not None:
            await turns.are_over.wait()
        elif name not in self._entries or not self._entries[name].models:
            return await self._tried(name)
        return None

    def _made_of(self, name: str) -> list[str]:
        """The ensembles that need it."""
        return [other for other, entry in self._entries.items() if name in entry.members]

    def _fit_ensembles(self, member: str) -> None:
        """It was loaded anew: those that wait for it are loaded, those that it fits no more are unloaded."""
        needing = {name: self._entries[name] for name in self._made_of(member)}
        for name, entry in needing.items():
            if member in entry.wanted and name not in self._turns:
                self._in_background(self._tried_again(name, entry.given))
        for name, entry in needing.items():
            try:
                has_changed = [ensemble.fit() for ensemble in entry.ensembles]
            except StatusError as error:
                log.error("%s: %s", name, error)
                self._remove(name, str(error))
            else:
                if any(has_changed):  # otherwise those that are made of it see what they saw
                    self._fit_ensembles(name)

    async def _tried_again(self, name: str, given: Brought) -> None:
        await self._tried(name, given)

    def _note(self, name: str, versions: Sequence[int], error: StatusError) -> None:
        """Why nothing is served; where an older one still is, its state stays what it was."""
        entry = self._entries.setdefault(name, Entry())
        if not entry.models:
            entry.states = {version: (State.UNAVAILABLE, str(error)) for version in versions}

    def _remove(self, name: str, reason: str = UNLOADED) -> None:
        """With the ensembles that need it, which come back when it does."""
        entry = self._entries[name]
        entry.wanted = frozenset[str]() if reason == UNLOADED else entry.members
        if reason == UNLOADED:
            self._missing.discard(name)
            entry.states = {version: (State.UNAVAILABLE, UNLOADED) for version in entry.states}
        for version, model in entry.models.items():
            entry.states[version] = (State.UNLOADING, "" if reason == UNLOADED else reason)
            self._in_background(self._retired(entry, version, model, reason))
        entry.models, entry.stamp = {}, None
        for other in self._made_of(name):
            if self._entries[other].models:
                self._remove(other, f"ensemble '{other}' depends on '{name}' which has no loaded version")

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
                found = await asyncio.to_thread(stamps, self.flags.roots)
            except OSError as error:  # away for a moment, perhaps: what is served stays
                if not is_blind:
                    log.warning("cannot look at the model repository, and tries again: %s", error)
                is_blind = True
                continue
            is_blind = False
            for name, of_files in found.items():
                entry = self._entries.get(name)
                if name not in self._turns and (entry is None or entry.stamp != of_files):
                    self._in_background(self._followed(name, of_files))
            for name, entry in self._entries.items():
                is_left = entry.models or name in self._missing or not entry.is_as_wished
                if name not in self._turns and name not in found and is_left:
                    self._remove(name)

    async def _followed(self, name: str, of_files: object) -> None:
        await self._tried(name)
        self._entries.setdefault(name, Entry()).stamp = of_files  # tried once, whatever came of it

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One change of a model at a time, of different models any number: none looks at what another is served from.

        raises StatusError where too many wait
        """
        turns = self._turns.setdefault(name, Turns())
        if turns.n >= _MOST_CHANGES:
            raise StatusError(Code.UNAVAILABLE, f"{turns.n} changes of model '{name}' wait for one that is under way")
        turns.n += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.n -= 1
            if not turns.n:
                del self._turns[name]
                turns.are_over.set()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _unknown(what: str, code: Code = Code.NOT_FOUND) -> StatusError:
    return StatusError(code, f"Request for unknown model: {what}")
