"""Resolves a model's name to a local folder: a path, or a hub id `org/name` or `org/name@revision`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.errors import CheckpointError, HubError

Progress = Callable[[int, int], None]  # downloaded bytes, total bytes; the total grows while files are being listed

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
# The files of a checkpoint. Mistral's repositories have a second copy of the weights, consolidated*.safetensors.
_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_TORCH_PATTERNS = ["*.json", "pytorch_model*.bin", "*.model", "*.jinja", "vocab.txt", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def resolve(
    model: str,
    *,
    hf_home: Path | None = None,
    token: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    torch_weights: bool = False,
) -> Path:
    """Return the folder of `model`, downloading it into the hub's cache if needed.

    hf_home: the hub's folder (`hub/` in it is the cache); None: ~/.cache/huggingface
    offline: use the cache only
    torch_weights: download weights of PyTorch, to be converted, instead of safetensors
    raises HubError if the id is unknown, private or cannot be reached; CheckpointError if there is no such folder or
        the repository has no such weights
    """
    try:
        local = Path(model).expanduser()
        if local.is_dir():
            return local
        exists = local.exists()
    except (OSError, RuntimeError):  # a name that is too long, or the home folder of an unknown user
        exists = False
    if exists:
        raise CheckpointError(
            f"{model} is a file, and not GGUF",
            "the folder of a Hugging Face checkpoint, a GGUF file, or a hub id",
            "name the folder it lies in",
        )
    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise CheckpointError(
            f"there is no {'file' if model.endswith('.gguf') else 'folder'} {model}",
            "the folder of a Hugging Face checkpoint, a GGUF file, or a hub id org/name or org/name@revision",
            "check the spelling",
        )
    cache = (hf_home or Path.home() / ".cache" / "huggingface") / "hub"
    patterns = _TORCH_PATTERNS if torch_weights else _PATTERNS
    folder = _download((match["repo"], match["revision"]), patterns, cache, token, offline, progress)
    if torch_weights:
        if not any(folder.glob("pytorch_model*.bin")):
            raise CheckpointError(
                f"{match['repo']} has no pytorch_model*.bin files", "weights of PyTorch, to be converted",
                "use it as it is if it has safetensors; other formats are not read",
            )  # fmt: skip
    elif not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{match['repo']} has no .safetensors files",
            "weights as safetensors; pickled ones (.bin, .pt) can run any code when opened, and have to be converted",
            f"convert it, which runs none of it: millrace convert {model} -o FOLDER",
        )
    return folder


def _download(
    repository: tuple[str, str | None], patterns: list[str], cache: Path, token: str | None, offline: bool,
    progress: Progress | None,
) -> Path:  # fmt: skip
    """repository: and its revision"""
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = repository
    shown = f"{repo}@{revision}" if revision else repo
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache,
            token=token,
            local_files_only=offline,
            allow_patterns=patterns,
            ignore_patterns=_UNWANTED,
            tqdm_class=_quiet_bar(progress),
        )
    except errors.GatedRepoError as error:
        raise HubError(
            f"{shown} is gated: its owner asks for consent first",
            "a token of a user who was given access",
            f"accept the terms at https://huggingface.co/{repo}, then set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{repo} has no revision {revision}", "a branch, tag or commit of it", "check the name"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"the hub has no model {repo} that {'this token' if token else 'anybody'} may read",
            "a public model, or a token that may read a private one",
            "check the spelling, or set HF_TOKEN",
        ) from error
    # the bases of HfHubHTTPError are the errors of the HTTP client in use; hf_xet raises RuntimeError
    except (*errors.HfHubHTTPError.__bases__, errors.EntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise _unreachable(shown, cache, offline, error) from error
    return Path(folder)


def _unreachable(shown: str, cache: Path, offline: bool, error: Exception) -> HubError:
    if offline:
        return HubError(
            f"{shown} is not in the cache {cache}, and HF_HUB_OFFLINE is set",
            "a model that was downloaded before",
            "unset HF_HUB_OFFLINE, or name a local folder",
        )
    reason = f"{type(error).__name__}: " + " ".join(str(error.__cause__ or error).split())
    return HubError(
        f"{shown} is not complete in the cache {cache}, and the hub cannot be reached ({reason})",
        "a network connection to huggingface.co, or the model in the cache",
        "download it where there is a network (`hf download`), copy the folder here and name the folder",
    )


def _quiet_bar(progress: Progress | None) -> type[Any]:
    """Return a progress bar class for the hub's library that draws nothing and reports the bytes of all files."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # a second bar, ".transfer", counts the bytes on the wire, which are fewer due to compression
            self.reports = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(".transfer")
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if progress is not None and self.reports:
                progress(int(self.n), int(self.total or 0))
            return None

    return Bar
