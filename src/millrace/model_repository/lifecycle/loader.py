"""A model as it was read, made into the versions that are served: by its backend, or as an ensemble of others."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from millrace.model_repository.backends import backend_named
from millrace.model_repository.execution.instance_worker import run_in_daemon_thread
from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.models.bls import BlsExecutor, Repository
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model, ModelVersionSource
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.models.resizable_model import ResizableModel
from millrace.model_repository.models.sequence_model import SequenceModel
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.sequence_states import States

_CODE_NAMES = {Code.INVALID_ARG: "Invalid argument", Code.NOT_FOUND: "Not found", Code.UNSUPPORTED: "Unsupported"}


class LoadFailedError(Exception):
    """error: why, of that version"""

    def __init__(self, version: int, error: StatusError) -> None:
        self.version, self.error = version, error
        super().__init__(version, error)

    def told(self, one: ModelId) -> StatusError:
        """To whoever loads the model."""
        word = _CODE_NAMES.get(self.error.code, self.error.code.name.capitalize())
        what = f"load failed for model '{one}': version {self.version} is at UNAVAILABLE state: {word}: {self.error};"
        return StatusError(Code.INTERNAL, what)


class Loader:
    """Of one repository, whose models may ask one another."""

    def __init__(self, repository: Repository, most_requests: int, custom: CustomMetrics) -> None:
        """most_requests: that one model holds"""
        self._repository, self._most_requests, self._custom = repository, most_requests, custom
        self._others: BlsExecutor | None = None  # by which models ask models, once one is there

    @property
    def common(self) -> RepositoryContext:
        return self._repository.common

    async def loaded(
        self, one: ModelId, read: repository_reader.Model, given: LoadOverride, find: Callable[[str, int | None], Model]
    ) -> dict[int, Model]:
        """All of its versions, or none. find: the models of an ensemble's steps. raises LoadFailedError"""
        loading: dict[int, Model] = {}
        version = max(read.served)
        try:
            made = await self._maker(one, read, find)
            for version in read.served:
                began_s = time.monotonic()
                loading[version] = made(version)
                if given.folder is not None:
                    loading[version].attach_override_folder(given.folder)
                await loading[version].loaded()
                loading[version].load_s = time.monotonic() - began_s
        except StatusError as failed:
            await asyncio.gather(*(model.retire() for model in loading.values()))
            raise LoadFailedError(version, failed) from None
        return loading

    async def _maker(
        self, one: ModelId, read: repository_reader.Model, find: Callable[[str, int | None], Model]
    ) -> Callable[[int], Model]:
        """What makes a version of it, which begins to load. raises StatusError"""
        loop, config = asyncio.get_running_loop(), read.config

        def found(version: int) -> ModelVersionSource:
            most = self._most_requests
            return ModelVersionSource(
                one.name, version, config, read.folder, read.labels, most, self.common, one.namespace
            )

        if config.ensemble_scheduling is not None:
            return lambda version: Ensemble(found(version), find, loop)
        backend = backend_named(config.backend)
        if (config.batch_input or config.batch_output) and not backend.takes_batch_io:
            what = f"batch_input and batch_output are not taken by backend '{config.backend}'"
            raise StatusError(Code.UNSUPPORTED, what)
        config = await run_in_daemon_thread(one.name, partial(backend.completed, config, read.folder))
        self._others = others = self._others or BlsExecutor(self._repository, self._custom, loop)
        if config.sequence_batching is None or config.sequence_batching.iterative_sequence:
            return lambda version: ResizableModel(found(version), backend, others, loop)
        states = await asyncio.to_thread(States, config, read.folder)
        return lambda version: SequenceModel(found(version), backend, others, loop, states)
