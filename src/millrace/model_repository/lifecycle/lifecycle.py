"""The served models, by the names that clients use: loaded and unloaded at start, on request, or by polling folders.

A name refers to every model of that name; internally, each model has a `ModelId`. `model_changes.py` makes the changes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.model_repository.lifecycle.dry_run import diff_load, orphaned_ensembles
from millrace.model_repository.lifecycle.load_override import Files, LoadOverride, OverrideFolder
from millrace.model_repository.lifecycle.load_source import check_name, config_text, read_for_dry_run
from millrace.model_repository.lifecycle.loader import Loader
from millrace.model_repository.lifecycle.model_changes import ModelChanges
from millrace.model_repository.lifecycle.model_index import ModelIndex, ReadyState, version_of
from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository.file_mtimes import stamps
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError

log = logging.getLogger(__name__)


class ModelRepository:
    """The models served by one event loop."""

    def __init__(self, flags: RepositoryFlags, common: RepositoryContext | None = None) -> None:
        """common: None for the defaults without flags"""
        self.flags, self.common, self._folders = flags, common or RepositoryContext(), flags.repositories
        self.custom, self._index = CustomMetrics(), ModelIndex()
        loader = Loader(self, flags.max_model_requests, self.custom)
        self._changes = ModelChanges(self._index, self._folders, loader, self.common)

    # ------------------------------------------------------------------ what there is

    def get(self, name: str, version: int | None = None) -> Model:
        """Return a served version; None: the highest. raises StatusError, also for an ambiguous name"""
        return version_of(self._index.find(name), name, version)

    def versions(self, name: str) -> list[int]:
        """Return the served versions of a model."""
        entry = self._index.find(name)
        return sorted(entry.models) if entry is not None else []

    def failed(self) -> Iterator[tuple[ModelId, int]]:
        return self._index.failed()

    def models(self) -> Iterator[Model]:
        for _, entry in self._index.items():
            yield from (entry.models[version] for version in sorted(entry.models))

    def find_by_name(self, name: str) -> list[ModelId]:
        """Return all models of that name that were ever loaded or tried."""
        return self._index.find_by_name(name)

    def pending_members(self, model_id: ModelId) -> frozenset[ModelId]:
        """Return the members that a loading ensemble waits for."""
        entry = self._index.get(model_id)
        return (
            frozenset(self._index.member(model_id, name) for name in entry.pending_members)
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
            for model_id, entry in self._index.items()
            if model_id not in self._changes.missing
        )
        return [
            *self._changes.missing.values(),
            *(f"model '{model_id}' {'; '.join(reasons)}" for model_id, reasons in per_model if reasons),
        ]

    async def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Return the repository index: every model in the folders, with the state of each tried version."""
        in_folders = await asyncio.to_thread(self._folders.ids)
        rows: list[dict[str, str]] = []
        for model_id in sorted({*in_folders, *(tried for tried, _ in self._index.items())}, key=_by_name):
            entry = self._index.get(model_id)
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
            matches = [await asyncio.to_thread(self._folders.find_by_name, name) for name in self.flags.load_model]
            ids = [model_id for of_name in matches for model_id in of_name]
        else:
            ids = await asyncio.to_thread(self._folders.ids)
        if self.flags.model_control_mode == "poll":  # before loading: a model that hangs must not stop the poll
            self._changes.in_background(self._poll())
        self._changes.requested.update(ids)
        tried = zip(ids, await asyncio.gather(*map(self._changes.try_load_logged, ids)), strict=True)
        failed = {model_id: str(error) for model_id, error in tried if error is not None}
        self._changes.missing.update(failed)
        return list(failed.values())

    async def load(
        self, name: str, config: Mapping[str, Any] | None = None, files: Files | None = None, *, owner: str = ""
    ) -> None:
        """Load for a client. config: replaces the configuration file. files: replace the folder's files.

        owner: the API key whose models may change; "" for all. raises StatusError
        """
        self._check_mode()
        self._index.check_owner(name, owner)
        # Shielded: a load interrupted by a client disconnect would leave instances that are never closed.
        text = config_text(name, config, files)
        await asyncio.shield(self._changes.in_background(self._load_requested(name, text, files, owner)))

    async def would_load(self, name: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what `load` would change, in any mode; an ambiguous name lists "models". raises StatusError"""
        check_name(name)
        override = LoadOverride(config_text(name, config, None))
        served = {model_id: entry.highest.config for model_id, entry in self._index.items() if entry.models}
        reports: list[dict[str, Any]] = []
        for model_id in await asyncio.to_thread(self._folders.find_by_name, name):
            file_stamp, read = await asyncio.to_thread(read_for_dry_run, self._folders, model_id, override, served)
            if read is not None and read.is_servable:
                read.problems.extend(orphaned_ensembles(self._index, model_id, read))
            would = diff_load(name, self._index.get(model_id), file_stamp, read)
            where = {"namespace": model_id.namespace} if model_id.namespace else {}
            reports.append(
                would | {"ensembles": sorted({str(other) for other in self._index.ensembles_of(model_id)})} | where
            )
        return reports[0] if len(reports) == 1 else {"name": name, "models": reports}

    async def unload(self, name: str, *, with_members: bool = False, owner: str = "") -> None:
        """Unload for a client; accepted requests are still answered. Dependent ensembles are unloaded, too.

        As in Triton, an unknown name is no error. owner: as for `load`. raises StatusError
        with_members: also unload members that were loaded only for this ensemble
        """
        self._check_mode()
        self._index.check_owner(name, owner)
        ids = sorted({*self._index.find_by_name(name), *self._changes.locks.find_by_name(name)})
        if not any(await asyncio.gather(*(self._changes.unload(model_id, with_members) for model_id in ids))):
            log.warning("nothing to unload: no model %r is there", name)

    async def close(self, within_s: float) -> None:
        """End waiting requests and unload everything, for at most `within_s` seconds."""
        for task in list(self._changes.tasks):
            task.cancel()
        models = list(self.models())
        for model in sorted(models, key=lambda m: not isinstance(m, Ensemble)):  # first those that submit to others
            model.abort()
        self._index.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(model.retire() for model in models))
        self.common.tracer.close()
        self.common.log.close()

    def _check_mode(self) -> None:
        if self.flags.model_control_mode != "explicit":
            message = "explicit model load / unload is not allowed if polling is enabled"
            raise StatusError(Code.UNAVAILABLE, message)

    async def _load_requested(self, name: str, config: bytes | None, files: Files | None, owner: str) -> None:
        """Load all models of a name. raises StatusError naming each model that cannot be loaded"""
        check_name(name)
        owners = {
            model_id: self._index[model_id].owner
            for model_id in self._index.find_by_name(name)
            if self._index[model_id].models
        }
        folder = await asyncio.to_thread(OverrideFolder, name, files) if files else None
        try:
            ids = [ModelId("", name)] if folder else await asyncio.to_thread(self._folders.find_by_name, name)
            tried = await asyncio.gather(
                *(self._changes.try_load(model_id, LoadOverride(config, folder)) for model_id in ids)
            )
        finally:
            if folder is not None:
                folder.release()  # the loaded models hold it now
        loaded = [model_id for model_id, error in zip(ids, tried, strict=True) if error is None]
        self._changes.requested.update(loaded)
        for model_id in loaded:
            self._index[model_id].owner = owner or owners.get(
                model_id, ""
            )  # an operator's load keeps the model's owner
        failed = [error for error in tried if error is not None]
        if failed:
            raise StatusError(failed[0].code, " ".join(error.message for error in failed))

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
                entry = self._index.get(model_id)
                if model_id not in self._changes.locks and (entry is None or entry.stamp != file_stamp):
                    self._changes.in_background(self._load_changed(model_id, file_stamp))
            for model_id, entry in self._index.items():
                is_left = entry.models or model_id in self._changes.missing or entry.unready_reasons
                if model_id not in self._changes.locks and model_id not in file_stamps and is_left:
                    self._changes.remove(model_id)

    async def _load_changed(self, model_id: ModelId, file_stamp: object) -> None:
        await self._changes.try_load_logged(model_id)
        self._index.get_or_create(model_id).stamp = file_stamp  # tried once, whether it succeeded or not


def _by_name(model_id: ModelId) -> tuple[str, str]:
    return model_id.name, model_id.namespace
