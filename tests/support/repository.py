"""A folder of tensor models, served in a thread of this process."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.serve.protocols.kserve.repository_backend import RepositoryModel
from millrace.serve.protocols.kserve.restricted_apis import RestrictionFlags
from millrace.serve.settings import ServerSettings
from tests.support.server import Threaded, in_thread

ADD_SUB = """backend: "add_sub" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
         { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
"""
REPEAT = """backend: "repeat" model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""


def identity(data_type: str, dims: str = "-1", more: str = "", parameters: str = "") -> str:
    return f"""backend: "identity" {more}
    input {{ name: "INPUT0" data_type: TYPE_{data_type} dims: [ {dims} ] {parameters} }}
    output {{ name: "OUTPUT0" data_type: TYPE_{data_type} dims: [ {dims} ] }}"""


def write_models(root: Path, models: Mapping[str, str], version: int = 1) -> Path:
    for name, config in models.items():
        (root / name / str(version)).mkdir(parents=True, exist_ok=True)
        (root / name / "config.pbtxt").write_text(config)
    return root


@contextmanager
def serving(root: Path, settings: ServerSettings | None = None, wait: bool = True, **flags: Any) -> Iterator[str]:
    """The URL."""
    with in_process(root, settings, wait, **flags) as served:
        yield served.url


@contextmanager
def in_process(
    root: Path, settings: ServerSettings | None = None, wait: bool = True, guards: RestrictionFlags | None = None,
    operations: OperationFlags | None = None, start_s: float = 30, **flags: Any,
) -> Iterator[Threaded]:  # fmt: skip
    said = {"model_repository": (str(root),), **flags}
    model = RepositoryModel(
        name="repository", created=0, max_context=0, flags=RepositoryFlags(**said),
        guards=guards or RestrictionFlags(), operations=operations or OperationFlags(),
    )  # fmt: skip
    with in_thread(model, settings, start_s=start_s, stop_s=30, wait=wait) as served:
        yield served


def refused(root: Path) -> str:
    """Why the only model of a repository cannot be loaded."""

    async def run() -> str:
        repository = ModelRepository(RepositoryFlags(model_repository=(str(root),)))
        (failed,) = await repository.start()
        await repository.close(1)
        return failed

    return asyncio.run(run())
