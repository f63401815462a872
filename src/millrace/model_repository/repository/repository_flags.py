"""Command-line flags of a model repository."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from millrace.model_repository.repository.multi_repository import Repositories
from millrace.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class RepositoryFlags(Settings):
    """Flags that choose the served models and how they change."""

    title: ClassVar = "Model repository (Triton)"

    model_repository: tuple[str, ...] = setting((), "Triton model repository, a folder of tensor models", metavar="DIR")
    model_control_mode: str = setting(
        "none", "none: load all models at the start; poll: follow folder changes; explicit: load on request",
        choices=("none", "poll", "explicit"),
    )  # fmt: skip
    load_model: tuple[str, ...] = setting((), "with explicit: model to load at the start; *: all", metavar="NAME")
    repository_poll_secs: float = setting(15.0, "with poll: poll interval in seconds", low=0.1)
    model_config_name: str = setting("", "use MODEL/configs/NAME.pbtxt if it exists", metavar="NAME")
    model_namespacing: bool = setting(False, "allow equal model names in several repositories")
    max_model_requests: int = setting(
        512, "maximum queued and running requests of a tensor model; further ones get 503", low=1
    )
    http_max_input_size: int = setting(64 << 20, "maximum size of a request to a tensor model", size=True, low=1)

    allow_client_shm: bool = setting(False, "allow tensors in shared memory registered by clients")
    grpc_port: int | None = setting(
        None, "port for the same protocol over gRPC; 0: any free port; default: none", low=0, high=65535
    )

    @property
    def repositories(self) -> Repositories:
        return Repositories(tuple(map(Path, self.model_repository)), self.model_config_name, self.model_namespacing)
