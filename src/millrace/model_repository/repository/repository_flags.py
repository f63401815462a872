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

    model_repository: tuple[str, ...] = setting((), "folder of tensor models, as Triton has it", metavar="DIR")
    model_control_mode: str = setting(
        "none", "all models at the start; as their folders change; or those that clients load",
        choices=("none", "poll", "explicit"),
    )  # fmt: skip
    load_model: tuple[str, ...] = setting((), "with explicit: loaded at the start; * for all", metavar="NAME")
    repository_poll_secs: float = setting(15.0, "with poll: seconds between two looks at the folders", low=0.1)
    model_config_name: str = setting("", "take MODEL/configs/NAME.pbtxt where it is", metavar="NAME")
    model_namespacing: bool = setting(False, "let a name occur in several of the folders")
    max_model_requests: int = setting(512, "requests that one tensor model holds; more get a 503", low=1)
    http_max_input_size: int = setting(64 << 20, "largest request to a tensor model", size=True, low=1)

    allow_client_shm: bool = setting(False, "tensors may lie in shared memory that clients register")
    grpc_port: int | None = setting(
        None, "port for the same protocol over gRPC; 0 takes a free one; default: none", low=0, high=65535
    )

    @property
    def repositories(self) -> Repositories:
        return Repositories(tuple(map(Path, self.model_repository)), self.model_config_name, self.model_namespacing)
