"""KServe's metadata and statistics of the server and of models."""

from collections.abc import Sequence
from typing import Any

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.request_validation import wire_name
from millrace.model_repository.request.status_code import invalid

# Triton's name and version, from which clients conclude what they may send, and the extensions that are supported.
VERSION = "2.73.0"
EXTENSIONS = (
    "classification", "sequence", "sequence(string_id)", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "binary_tensor_data", "parameters", "statistics",
    "trace", "logging",
)  # fmt: skip


def server(with_shared_memory: bool) -> dict[str, Any]:
    more = ("system_shared_memory",) if with_shared_memory else ()
    return {"name": "triton", "version": VERSION, "extensions": [*EXTENSIONS, *more]}


def metadata(model: Model, versions: Sequence[int]) -> dict[str, Any]:
    config = model.config
    batch = [-1] if config.max_batch_size > 0 else []

    def tensors(side: Sequence[Any]) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": wire_name(t.data_type), "shape": [*batch, *t.dims]} for t in side]

    return {
        "name": model.name, "versions": [str(v) for v in versions], "platform": config.platform or config.backend,
        "inputs": tensors(config.input), "outputs": tensors(config.output),
    }  # fmt: skip


def statistics(repository: ModelRepository, name: str = "", version: int | None = None) -> list[dict[str, Any]]:
    """Return the statistics of all versions of all models, of one model's versions, or of one. raises StatusError"""
    if not name:
        return [model.statistics_dict() for model in repository.models()]
    repository.get(name)
    versions = repository.versions(name)
    if version is not None:
        if version not in versions:  # Triton's words here, and nowhere else
            raise invalid(f"requested model version is not available for model '{name}'")
        versions = [version]
    return [repository.get(name, v).statistics_dict() for v in versions]
