"""How a model is named: by clients, and among all repositories, where two may have a model of the same name."""

from collections.abc import Collection
from typing import NamedTuple

from millrace.errors import RequestError

_LONGEST_NAME = 255  # of a folder


class ModelId(NamedTuple):
    """Of one model. namespace: the repository that it is in, where a name may occur in several; else empty"""

    namespace: str
    name: str

    def __str__(self) -> str:
        """As Triton writes it."""
        return f"{self.namespace}::{self.name}" if self.namespace else self.name


def chosen(wanted: ModelId, there: Collection[ModelId]) -> ModelId | None:
    """What a step of an ensemble means: the model beside the ensemble, or the only one of that name; None: neither."""
    if wanted in there:
        return wanted
    others = [one for one in there if one.name == wanted.name]
    return others[0] if len(others) == 1 else None


def may_be_folder(name: str) -> bool:
    """Whether a model's folder may have that name: no path, nothing hidden, no longer than names are."""
    try:
        check_model_name(name)
    except RequestError:
        return False
    return not name.startswith(".")


def check_model_name(name: str) -> None:
    """raises RequestError where a client's name is none of a folder"""
    if not name:
        raise RequestError("Model name cannot be empty. Specify a model name.", "a model's name", "name one", "model")
    if len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
        what = f"model name has more than {_LONGEST_NAME} bytes"
        raise RequestError(what, "a model's name", "name a model of the repository", "model")
    if name in (".", "..") or any(c in name for c in "/\\\0"):
        what = "model name must not contain path traversal characters"
        raise RequestError(what, "a model's name", "name a model of the repository", "model")
