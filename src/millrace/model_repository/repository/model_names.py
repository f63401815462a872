"""Model names: validation of clients' names, and ids that are unique across repositories."""

from collections.abc import Collection
from typing import NamedTuple

from millrace.errors import RequestError

_MAX_NAME_BYTES = 255  # limit of folder names


class ModelId(NamedTuple):
    """Id of a model. namespace: its repository if names may occur in several, otherwise empty"""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Format as Triton does."""
        return f"{self.namespace}::{self.name}" if self.namespace else self.name


def resolve_step(model_id: ModelId, candidates: Collection[ModelId]) -> ModelId | None:
    """Resolve a step's model: in the ensemble's namespace, or the only one of that name; None if neither exists."""
    if model_id in candidates:
        return model_id
    same_name = [candidate for candidate in candidates if candidate.name == model_id.name]
    return same_name[0] if len(same_name) == 1 else None


def may_be_folder(name: str) -> bool:
    """Return whether a model's folder may have that name: not a path, not hidden, not too long."""
    try:
        check_model_name(name)
    except RequestError:
        return False
    return not name.startswith(".")


def check_model_name(name: str) -> None:
    """Check that a client's name can be a folder's name. raises RequestError"""
    if not name:
        raise RequestError("Model name cannot be empty. Specify a model name.", "a model's name", "name one", "model")
    if len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
        message = f"model name has more than {_MAX_NAME_BYTES} bytes"
        raise RequestError(message, "a model's name", "name a model of the repository", "model")
    if name in (".", "..") or any(c in name for c in "/\\\0"):
        message = "model name must not contain path traversal characters"
        raise RequestError(message, "a model's name", "name a model of the repository", "model")
