"""Loader: creates the served versions of a model that was read, through its backend or as an ensemble."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from millrace.model_repository.backends import create_backend
from millrace.model_repository.execution.instance_worker import run_in_daemon_thread
from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.models.bls import BlsExecutor, BlsRepository
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model, ModelVersionSource
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.models.resizable_model import ResizableModel
from millrace.model_repository.models.sequence_model import SequenceModel
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.sequence_states import SequenceStates

_CODE_NAMES = {Code.INVALID_ARG: "Invalid argument", Code.NOT_FOUND: "Not found", Code.UNSUPPORTED: "Unsupported"}


class LoadFailedError(Exception):
    """A failed load. error: why that version could not be loaded"""

    def __init__(self, version: int, error: StatusError) -> None:
        self.version, self.error = version, error
        super().__init__(version, error)

    def to_status_error(self, model_id: ModelId) -> StatusError:
        """Return the error that the load reports."""
        word = _CODE_NAMES.get(self.error.code, self.error.code.name.capitalize())
        message = (
            f"load failed for model '{model_id}': version {self.version} is at UNAVAILABLE state: {word}: {self.error};"
        )
        return StatusError(Code.INTERNAL, message)


class Loader:
    """Loader of one repository, whose models may call one another."""

    def __init__(self, repository: BlsRepository, max_requests: int, custom: CustomMetrics) -> None:
        """max_requests: unanswered requests per model"""
        self._repository, self._max_requests, self._custom = repository, max_requests, custom
        self._bls: BlsExecutor | None = None  # created with the first model

    @property
    def common(self) -> RepositoryContext:
        return self._repository.common

    async def load(
        self,
        model_id: ModelId,
        read: repository_reader.ModelFolder,
        override: LoadOverride,
        find: Callable[[str, int | None], Model],
    ) -> dict[int, Model]:
        """Load all versions or none. find: returns the models of an ensemble's steps. raises LoadFailedError"""
        loading: dict[int, Model] = {}
        version = max(read.served)
        try:
            create = await self._version_factory(model_id, read, find)
            for version in read.served:
                began_s = time.monotonic()
                loading[version] = create(version)
                if override.folder is not None:
                    loading[version].attach_override_folder(override.folder)
                await loading[version].loaded()
                loading[version].load_s = time.monotonic() - began_s
        except StatusError as failed:
            await asyncio.gather(*(model.retire() for model in loading.values()))
            raise LoadFailedError(version, failed) from None
        return loading

    async def _version_factory(
        self, model_id: ModelId, read: repository_reader.ModelFolder, find: Callable[[str, int | None], Model]
    ) -> Callable[[int], Model]:
        """Return a function that creates a version and starts loading it. raises StatusError"""
        loop, config = asyncio.get_running_loop(), read.config

        def version_source(version: int) -> ModelVersionSource:
            max_requests = self._max_requests
            return ModelVersionSource(
                model_id.name, version, config, read.folder, read.labels, max_requests, self.common, model_id.namespace
            )

        if config.ensemble_scheduling is not None:
            return lambda version: Ensemble(version_source(version), find, loop)
        backend = create_backend(config.backend)
        if (config.batch_input or config.batch_output) and not backend.takes_batch_io:
            message = f"batch_input and batch_output are not taken by backend '{config.backend}'"
            raise StatusError(Code.UNSUPPORTED, message)
        config = await run_in_daemon_thread(model_id.name, partial(backend.complete_config, config, read.folder))
        self._bls = bls = self._bls or BlsExecutor(self._repository, self._custom, loop)
        if config.sequence_batching is None or config.sequence_batching.iterative_sequence:
            return lambda version: ResizableModel(version_source(version), backend, bls, loop)
        states = await asyncio.to_thread(SequenceStates, config, read.folder)
        return lambda version: SequenceModel(version_source(version), backend, bls, loop, states)
