"""From a name to a folder: local folders, hub ids, no network, caches. The hub itself is a stand-in here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from millrace.checkpoint.hub import resolve
from millrace.errors import CheckpointError, HubError

Answer = Callable[..., str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Answer `snapshot_download` with a function; returns the list of its calls."""
    calls: list[dict[str, Any]] = []

    def install(answer: Answer) -> list[dict[str, Any]]:
        def download(repo: str, **options: Any) -> str:
            calls.append({"repo": repo, **options})
            return answer(**options)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return install


def cached(cache: Path, files: list[str], commit: str = "a" * 40) -> Path:
    """A repository in the hub's cache, as huggingface_hub lays it out."""
    root = cache / "hub" / "models--mill--race"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    ["no/such/folder", "./missing", "/missing", "gpt2", "x" * 5000, "~nobody-here/x", "org/name@", "org/na me", "../x"],
)
def test_what_is_neither_folder_nor_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="org/name@revision"):
        resolve(name)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file"):
        resolve(str(tmp_path / "model.gguf"))


def test_offline_uses_the_cache(tmp_path: Path) -> None:
    folder = cached(tmp_path, ["config.json", "model.safetensors"])
    assert resolve("mill/race", hf_home=tmp_path, offline=True) == folder
    assert resolve(f"mill/race@{'a' * 40}", hf_home=tmp_path, offline=True) == folder
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        resolve("mill/other", hf_home=tmp_path, offline=True)


def test_a_repository_of_pickles(tmp_path: Path) -> None:
    cached(tmp_path, ["config.json"])
    with pytest.raises(CheckpointError) as caught:
        resolve("mill/race", hf_home=tmp_path, offline=True)
    assert "pickle" in caught.value.expected and "millrace convert mill/race -o FOLDER" in caught.value.fix
    with pytest.raises(CheckpointError, match=r"has no pytorch_model\*\.bin"):
        resolve("mill/race", hf_home=tmp_path, offline=True, torch_weights=True)


def test_weights_of_pytorch_are_downloaded_to_be_converted(
    tmp_path: Path, hub: Callable[[Answer], list[dict[str, Any]]]
) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    calls = hub(lambda **_: str(tmp_path))
    assert resolve("mill/race", hf_home=tmp_path, torch_weights=True) == tmp_path
    files = ["config.json", "pytorch_model-00001-of-00002.bin", "tokenizer.model", "merges.txt"]
    others = ["model.safetensors", "tf_model.h5", "training_args.bin", "modeling.py"]
    allowed = calls[0]["allow_patterns"]
    assert list(huggingface_hub.utils.filter_repo_objects([*files, *others], allow_patterns=allowed)) == files


def test_what_is_asked_of_the_hub(tmp_path: Path, hub: Callable[[Answer], list[dict[str, Any]]]) -> None:
    """Only what a checkpoint is read from, and the bytes are reported."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    seen: list[tuple[int, int]] = []

    def answer(tqdm_class: Any, **options: Any) -> str:
        for name in ("huggingface_hub.snapshot_download.transfer", "huggingface_hub.snapshot_download"):
            bar = tqdm_class(disable=None, name=name, desc="x", total=0, initial=0, unit="B", unit_scale=True)
            bar.total += 10
            bar.refresh()
            bar.update(4)
            bar.update(6)
            bar.close()
        with tqdm_class(total=3, desc="files") as files:
            files.update()
        return str(tmp_path)

    calls = hub(answer)
    found = resolve("mill/race@v1.0", hf_home=tmp_path, token="t", progress=lambda *sizes: seen.append(sizes))
    assert found == tmp_path and seen == [(4, 10), (10, 10)]
    (call,) = calls
    assert (call["repo"], call["revision"], call["token"]) == ("mill/race", "v1.0", "t")
    assert call["cache_dir"] == tmp_path / "hub" and not call["local_files_only"]
    files = ["config.json", "model-1.safetensors", "tokenizer.model", "chat_template.jinja"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, *others], allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
    )
    assert list(kept) == files


def failing(error: Exception) -> Answer:
    def answer(**options: Any) -> str:
        raise error

    return answer


def http_error(kind: type[Exception]) -> Exception:
    import httpx

    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error", httpx.Request("GET", "https://huggingface.co"))
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError), ["gated", "HF_TOKEN", "https://huggingface.co/mill/race"]),
        (http_error(errors.RepositoryNotFoundError), ["no model mill/race", "spelling"]),
        (http_error(errors.RevisionNotFoundError), ["no revision v2"]),
        (errors.LocalEntryNotFoundError("no connection"), ["cannot be reached", "network", "copy the folder"]),
        (ConnectionError("name resolution"), ["cannot be reached", "name resolution", "copy the folder"]),
        (OSError(28, "No space left on device"), ["No space left on device"]),
    ],
)
def test_every_failure_says_what_to_do(
    tmp_path: Path, hub: Callable[[Answer], list[dict[str, Any]]], error: Exception, words: list[str]
) -> None:
    hub(failing(error))
    with pytest.raises(HubError) as caught:
        resolve("mill/race@v2", hf_home=tmp_path)
    for word in words:
        assert word in str(caught.value)
