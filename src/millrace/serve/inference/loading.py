"""A model as it was read, made into the versions that are served: by its backend, or as an ensemble of others."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from millrace.serve.inference.backends import backend_named
from millrace.serve.inference.brought import Brought
from millrace.serve.inference.common import Common
from millrace.serve.inference.custom_metrics import CustomMetrics
from millrace.serve.inference.ensemble import Ensemble
from millrace.serve.inference.instances import in_own_thread
from millrace.serve.inference.model import Loadable, Model
from millrace.serve.inference.others import Others, Repository
from millrace.serve.inference.resizable import ResizableModel
from millrace.serve.inference.sequence_model import SequenceModel
from millrace.serve.inference.states import States
from millrace.serve.inference.status import Code, StatusError
from millrace.serve.repository import folders
from millrace.serve.repository.names import ModelId

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
        self._others: Others | None = None  # by which models ask models, once one is there

    @property
    def common(self) -> Common:
        return self._repository.common

    async def loaded(
        self, one: ModelId, read: folders.Model, given: Brought, find: Callable[[str, int | None], Model]
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
                    loading[version].keep(given.folder)
                await loading[version].loaded()
                loading[version].load_s = time.monotonic() - began_s
        except StatusError as failed:
            await asyncio.gather(*(model.retire() for model in loading.values()))
            raise LoadFailedError(version, failed) from None
        return loading

    async def _maker(
        self, one: ModelId, read: folders.Model, find: Callable[[str, int | None], Model]
    ) -> Callable[[int], Model]:
        """What makes a version of it, which begins to load. raises StatusError"""
        loop, config = asyncio.get_running_loop(), read.config

        def found(version: int) -> Loadable:
            most = self._most_requests
            return Loadable(one.name, version, config, read.folder, read.labels, most, self.common, one.namespace)

        if config.ensemble_scheduling is not None:
            return lambda version: Ensemble(found(version), find, loop)
        backend = backend_named(config.backend)
        if (config.batch_input or config.batch_output) and not backend.takes_batch_io:
            what = f"batch_input and batch_output are not taken by backend '{config.backend}'"
            raise StatusError(Code.UNSUPPORTED, what)
        config = await in_own_thread(one.name, partial(backend.completed, config, read.folder))
        self._others = others = self._others or Others(self._repository, self._custom, loop)
        if config.sequence_batching is None or config.sequence_batching.iterative_sequence:
            return lambda version: ResizableModel(found(version), backend, others, loop)
        states = await asyncio.to_thread(States, config, read.folder)
        return lambda version: SequenceModel(found(version), backend, others, loop, states)
