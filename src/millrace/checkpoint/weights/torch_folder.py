"""Checkpoint folders whose weights are files of PyTorch: which files these are, and all of their tensors."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.files import read_small
from millrace.checkpoint.weights.torch_file import TorchFile, TorchTensorInfo
from millrace.errors import CheckpointError

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Files that a trainer leaves beside the weights.
_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)")
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.(bin|pt|pth)|consolidated\.\d\d\.pth")


@dataclass(frozen=True, slots=True)
class TorchFolder:
    """The tensors of a folder, in the order of its files."""

    folder: Path
    files: tuple[TorchFile, ...]

    @classmethod
    def open(cls, folder: Path) -> "TorchFolder":
        """Open every weight file. raises CheckpointError if there is none, one is missing or damaged, or two files have
        a tensor of the same name"""
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else [_single(folder)]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:5])}",
                f"every file that {TORCH_INDEX} names", "finish the download of the checkpoint",
            )  # fmt: skip
        result = cls(folder, tuple(TorchFile.open(folder / name) for name in names))
        file_of: dict[str, str] = {}
        for file in result.files:
            for tensor in file.tensors:
                if tensor in file_of:
                    raise CheckpointError(
                        f"{tensor} is in {file_of[tensor]} and in {file.path.name}", "each tensor in one file",
                        "remove the weight file that does not belong to this checkpoint",
                    )  # fmt: skip
                file_of[tensor] = file.path.name
        for tensor, name in (index or {}).items():
            if file_of.get(tensor) != name:
                raise CheckpointError(
                    f"{folder / name} has no tensor {tensor}", f"what {TORCH_INDEX} promises",
                    "download the checkpoint again",
                )  # fmt: skip
        return result

    @property
    def tensors(self) -> Mapping[str, TorchTensorInfo]:
        """Return all tensors by name."""
        return {name: info for file in self.files for name, info in file.tensors.items()}

    @property
    def extras(self) -> tuple[str, ...]:
        """Return descriptions of the entries that are no tensors."""
        return tuple(extra for file in self.files for extra in file.extras)

    def blocks(self) -> Iterator[tuple[str, Iterator[NDArray[np.uint8]]]]:
        """Yield each tensor's name, and the blocks of its bytes. raises CheckpointError if a file has changed"""
        for file in self.files:
            for name in file.tensors:
                yield name, file.blocks(name)


def torch_weight_files(folder: Path) -> list[str]:
    """Return the names of the files that may hold weights of PyTorch."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in TORCH_SUFFIXES)
    return [name for name in names if not _TRAINING.fullmatch(name) and name != "program.bin"]  # an engine's


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor name -> file name; None if there is a pytorch_model.bin, or no index."""
    path = folder / TORCH_INDEX
    if (folder / TORCH_SINGLE).is_file() or not path.is_file():
        return None
    try:
        raw = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON: {error}", "the index of a sharded checkpoint", "download or copy the file again"
        ) from error
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not names or not all(_is_plain_name(name) for name in names.values()):
        raise CheckpointError(
            f"{path} has no usable weight_map", "{tensor name: name of a .bin file in this folder}",
            "download or copy the file again",
        )  # fmt: skip
    return names


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(TORCH_SUFFIXES) and Path(name).name == name


def _single(folder: Path) -> str:
    names = torch_weight_files(folder)
    if TORCH_SINGLE in names:
        return TORCH_SINGLE
    if len(names) == 1 and not _SHARD.fullmatch(names[0]):
        return names[0]
    if not names:
        raise CheckpointError(
            f"{folder} has no weights of PyTorch", f"{TORCH_SINGLE}, {TORCH_INDEX}, or one .bin, .pt or .pth file",
            "name the folder of a complete checkpoint",
        )  # fmt: skip
    what = f"{folder} has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} but no {TORCH_INDEX}"
    raise CheckpointError(
        what, f"{TORCH_INDEX} beside the files it names, or one file",
        f"copy {TORCH_INDEX} as well, or leave only the file of the weights in the folder",
    )  # fmt: skip
