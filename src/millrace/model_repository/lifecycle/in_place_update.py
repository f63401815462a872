"""In-place loads: if nothing or only the instance groups changed, the model is not reloaded, as in Triton."""

import logging
from dataclasses import replace
from pathlib import Path

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.lifecycle.loader import LoadFailedError
from millrace.model_repository.lifecycle.model_index import ModelEntry
from millrace.model_repository.models.resizable_model import ResizableModel
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.file_mtimes import changed_files
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import StatusError

log = logging.getLogger(__name__)


async def update_in_place(
    model_id: ModelId,
    entry: ModelEntry | None,
    file_stamp: object,
    read: repository_reader.ModelFolder | None,
    override: LoadOverride,
) -> bool:
    """Update the served models in place and return True; False if a full load is needed.

    Ensembles, whose members may have changed, and models that are not fully ready are always loaded.
    file_stamp, read: the current state. raises StatusError, changing nothing, if a new instance cannot be loaded
    """
    if entry is None or not entry.models or entry.unready_reasons or override.folder is not None:
        return False
    if read is None or not read.is_servable or entry.read is None or set(read.served) != set(entry.models):
        return False
    if read.config.ensemble_scheduling is not None or not _is_same_but_instances(read.config, entry.read.config):
        return False
    if entry.stamp != file_stamp and not _is_configuration_alone(entry.stamp, file_stamp, read.folder):
        return False
    if read.config == entry.read.config:
        log.info("%s has not changed since it was loaded", model_id)
    else:
        models = [model for model in entry.models.values() if isinstance(model, ResizableModel)]
        if len(models) < len(entry.models):
            return False
        for model in models:
            try:
                await model.resize(read.config.instance_group)
            except StatusError as error:
                raise LoadFailedError(model.version, error).to_status_error(model_id) from None
        log.info("%s has other instances now", model_id)
    entry.stamp, entry.read = file_stamp, read
    return True


def _is_same_but_instances(new: ModelConfig, old: ModelConfig) -> bool:
    return replace(new, instance_group=()) == replace(old, instance_group=())


def _is_configuration_alone(before: object, after: object, folder: Path) -> bool:
    """Return whether only config.pbtxt or files in configs/ have changed."""
    places = (folder, folder / "configs")
    changed = [Path(path) for path in changed_files(before, after)]
    return all(path.suffix == ".pbtxt" and path.parent in places for path in changed)
