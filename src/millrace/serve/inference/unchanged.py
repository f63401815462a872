"""Whether a load would make what is served already."""

import logging

from millrace.serve.inference.brought import Brought
from millrace.serve.inference.entries import Entry
from millrace.serve.repository import folders

log = logging.getLogger(__name__)


def is_served_already(entry: Entry | None, of_files: object, read: folders.Model | None, given: Brought) -> bool:
    """As in Triton, a load changes nothing if no file of the model and nothing of its configuration changed.

    Not of an ensemble, whose members may have; nor of a model that is not whole, which a load repairs.
    """
    if entry is None or not entry.models or entry.troubles or given.folder is not None:
        return False
    if read is None or entry.read is None or read.config.ensemble_scheduling is not None:
        return False
    is_same = entry.stamp == of_files and read.config == entry.read.config and set(read.served) == set(entry.models)
    if is_same:
        log.info("%s has not changed since it was loaded", read.config.name)
    return is_same
