"""A load that changes nothing of what is served, or its instances alone: nothing else is loaded, as in Triton."""

import logging
from dataclasses import replace
from pathlib import Path

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.lifecycle.loader import LoadFailedError
from millrace.model_repository.lifecycle.model_index import Entry
from millrace.model_repository.models.resizable_model import ResizableModel
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.file_mtimes import changed_files
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.status_code import StatusError

log = logging.getLogger(__name__)


async def changed_in_place(
    one: ModelId, entry: Entry | None, of_files: object, read: repository_reader.Model | None, given: LoadOverride
) -> bool:
    """Whether what is served now is what a load would make; False: the load has to make it.

    Not of an ensemble, whose members may have changed; nor of a model that is not whole, which a load repairs.
    of_files, read: as they are now. raises StatusError if a new instance cannot be loaded; all is as it was then
    """
    if entry is None or not entry.models or entry.troubles or given.folder is not None:
        return False
    if read is None or not read.is_servable or entry.read is None or set(read.served) != set(entry.models):
        return False
    if read.config.ensemble_scheduling is not None or not _is_same_but_instances(read.config, entry.read.config):
        return False
    if entry.stamp != of_files and not _is_configuration_alone(entry.stamp, of_files, read.folder):
        return False
    if read.config == entry.read.config:
        log.info("%s has not changed since it was loaded", one)
    else:
        models = [model for model in entry.models.values() if isinstance(model, ResizableModel)]
        if len(models) < len(entry.models):
            return False
        for model in models:
            try:
                await model.resize(read.config.instance_group)
            except StatusError as error:
                raise LoadFailedError(model.version, error).told(one) from None
        log.info("%s has other instances now", one)
    entry.stamp, entry.read = of_files, read
    return True


def _is_same_but_instances(new: ModelConfig, old: ModelConfig) -> bool:
    return replace(new, instance_group=()) == replace(old, instance_group=())


def _is_configuration_alone(before: object, after: object, folder: Path) -> bool:
    """Whether no file of the model but config.pbtxt, or one of configs/, is another one."""
    places = (folder, folder / "configs")
    changed = [Path(path) for path in changed_files(before, after)]
    return all(path.suffix == ".pbtxt" and path.parent in places for path in changed)
