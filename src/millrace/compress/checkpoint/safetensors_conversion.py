"""Rewrites a checkpoint folder with weights of PyTorch as one with safetensors; the values stay as they are.

Tensors that share a storage are written each for itself: whatever config.json ties, every name is there to be loaded.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.checkpoint.checkpoint import CONFIG
from millrace.checkpoint.weights.safetensors import INDEX, SINGLE
from millrace.checkpoint.weights.torch_folder import TORCH_INDEX, TorchFolder, torch_weight_files
from millrace.compress.checkpoint.checkpoint_writer import TensorWriter, check_place, unfinished
from millrace.compress.checkpoint.tensor_layout import NAMES, StoredTensorSpec
from millrace.errors import CheckpointError, ConfigError

SHARD_BYTES = 5_000_000_000
_MAX_FILES, _MAX_DEPTH = 1000, 3  # of files that are copied
# Weights in other formats, and what a trainer leaves behind.
_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".h5", ".msgpack", ".ot", ".gguf", ".onnx", ".onnx_data")
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """A written folder. nbytes: of its tensors; weights: names of its weight files; copied: of the other files

    extras: entries of the source that are no tensors; left_out: its files that were not copied
    """

    folder: Path
    tensors: int
    nbytes: int
    weights: tuple[str, ...]
    copied: tuple[str, ...]
    extras: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes to show to the user about what the folder does not have."""
        rows = (
            (self.extras, "not in the result, because they are not tensors"),
            (self.left_out, "not copied, because they are other weights or the state of a training"),
        )
        return tuple(
            f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
            for names, what in rows
            if names
        )


def convert_to_safetensors(
    source: Path, out: Path, progress: Progress = lambda *_: None, shard_bytes: int = SHARD_BYTES
) -> ConversionResult:
    """Write the folder `out`, which must not exist: complete, or not at all. Memory: a block, or a tensor whose
    elements are not in order.

    raises CheckpointError for errors of the source, ConfigError if `out` exists or the source has safetensors already,
    MachineError if the disk has no room
    """
    _check_source(source)
    torch_folder = TorchFolder.open(source)
    infos = torch_folder.tensors
    copied, left_out = _other_files(source, {file.path for file in torch_folder.files})
    specs = {name: StoredTensorSpec(NAMES[info.dtype], info.shape) for name, info in infos.items()}
    total = sum(spec.nbytes for spec in specs.values())
    check_place(out, total + sum((source / path).stat().st_size for path in copied))
    with unfinished(out) as path:
        writer, done = TensorWriter(path, specs, shard_bytes), 0
        for name, blocks in torch_folder.blocks():
            progress(f"converting {name}", done, total)
            writer.put_blocks(name, blocks)
            done += specs[name].nbytes
        writer.finish()
        for relative in copied:
            (path / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / relative, path / relative)
        weights = tuple(sorted(file.name for file in path.glob("*.safetensors")))
    return ConversionResult(out, len(specs), total, weights, copied, torch_folder.extras, left_out)


def _check_source(source: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is no folder", "a folder with weights of PyTorch", "name the folder of the checkpoint"
        )
    if (source / SINGLE).is_file() or (source / INDEX).is_file():
        raise ConfigError(
            f"{source} has its weights as safetensors already", "a folder whose weights are .bin, .pt or .pth only",
            "use the folder as it is: there is nothing to convert",
        )  # fmt: skip
    if torch_weight_files(source) and not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source} has no {CONFIG}", "the folder of a Hugging Face checkpoint", "copy the file as well"
        )


def _other_files(source: Path, weights: set[Path]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return relative paths of the files to copy, and of those that are left out because they are weights, too.

    Hidden files, and files below linked folders, are not looked at. raises CheckpointError if there are too many
    """
    copied, left_out, folders = list[str](), list[str](), [source]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            relative = path.relative_to(source)
            if path in weights or path.name.startswith(".") or path.name in (TORCH_INDEX, INDEX):
                continue
            if path.is_dir() and not path.is_symlink() and len(relative.parts) < _MAX_DEPTH:
                folders.append(path)
            elif path.is_file():
                (left_out if path.suffix in _WEIGHTS else copied).append(relative.as_posix())
            if len(copied) + len(left_out) > _MAX_FILES:
                raise CheckpointError(
                    f"{source} has more than {_MAX_FILES} files", "the folder of one checkpoint",
                    "name a folder that holds nothing else",
                )  # fmt: skip
    return tuple(sorted(copied)), tuple(sorted(left_out))
