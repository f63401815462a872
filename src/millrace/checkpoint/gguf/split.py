"""Opens GGUF files that llama.cpp's gguf-split divided: model-00001-of-00003.gguf and the files that follow it.

The first part has the metadata. All parts have split.no (from 0), split.count and split.tensors.count (of all parts).
"""

import re
from pathlib import Path

from millrace.checkpoint.files import FileState
from millrace.checkpoint.gguf.reader import GgufFile, GgufTensor, damaged
from millrace.errors import CheckpointError

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)?")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_COPY_ALL = "download or copy all parts into one folder, with the names that they had"


def open_parts(path: Path) -> GgufFile:
    """Open a file, and all others if it is the first part of a model. raises CheckpointError"""
    first = GgufFile.open(path)
    count, number = _integer(first, _COUNT, 1), _integer(first, _NUMBER, 0)
    if count <= 1:
        return first
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: {_COUNT} is {count}", f"a name that ends in -00001-of-{count:05}.gguf", _COPY_ALL
        )
    names = [f"{match[1]}-{i:05}-of-{count:05}{match[4] or ''}" for i in range(1, count + 1)]
    if number != 0 or path.name != names[0]:
        raise CheckpointError(
            f"{path} is part {number + 1} of {count}", "the first part, which has the metadata", f"name {names[0]}"
        )
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts are missing: {', '.join(missing[:5])}",
            f"{count} files in {path.parent}", _COPY_ALL,
        )  # fmt: skip
    parts = [first, *(GgufFile.open(path.with_name(name)) for name in names[1:])]
    return _joined(parts, count)


def _joined(parts: list[GgufFile], count: int) -> GgufFile:
    """Return the parts as one file, after checking that they belong together."""
    tensors: dict[str, GgufTensor] = {}
    states: dict[Path, FileState] = {}
    for at, part in enumerate(parts):
        stated = _integer(part, _NUMBER, 0), _integer(part, _COUNT, 1)
        if stated != (at, count):
            what = f"is part {stated[0] + 1} of {stated[1]} by its metadata"
            damaged(part.path, what, f"part {at + 1} of {count}, as its name says", _COPY_ALL)
        states |= part.states
        for name, tensor in part.tensors.items():
            if name in tensors:
                damaged(
                    part.path, f"has the tensor {name}", f"each tensor once: {tensors[name].file} has it", _COPY_ALL
                )
            tensors[name] = tensor
    total = _integer(parts[0], _TENSORS, len(tensors))
    if total != len(tensors):
        what = f"has {_TENSORS} = {total}, its {count} parts have {len(tensors)} tensors"
        damaged(parts[0].path, what, "parts of one model", _COPY_ALL)
    return GgufFile(parts[0].path, parts[0].metadata, tensors, states)


def _integer(file: GgufFile, key: str, missing: int) -> int:
    value = file.metadata.get(key, missing)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        damaged(file.path, f"has {key} = {value!r}", "an integer", _COPY_ALL)
    return value
