"""Finds the members of a zip file that are stored without compression, and where their bytes are.

The file is hostile input: sizes and places are checked against the file before anything is allocated, and members may
neither overlap nor share a name. Names are only looked up; nothing is extracted. PyTorch's zip files have no comment.

source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.3.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from millrace.errors import CheckpointError

MAX_DIRECTORY_BYTES = 64 << 20  # 200,000 tensors have some 20 MB
_END, _LOCATOR, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_FULL32 = 0xFFFFFFFF  # a value that stands in a zip64 record instead
ReadAt = Callable[[int, int], bytes]  # offset, bytes; raises CheckpointError


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member without compression. offset: of its data, in the file"""

    name: str
    offset: int
    nbytes: int


def read_zip_directory(path: Path, nbytes: int, read_at: ReadAt) -> dict[str, ZipMember]:
    """Return the members of a zip file by name. nbytes: of the file. raises CheckpointError if it is damaged,
    compressed or encrypted"""
    start, size, count = _directory_place(path, nbytes, read_at)
    if size > MAX_DIRECTORY_BYTES:
        _damaged(path, f"has a directory of {size:,} bytes", f"at most {MAX_DIRECTORY_BYTES:,}")
    if start + size > nbytes or count * _ENTRY.size > size:
        _damaged(path, f"has a directory of {count} members in {size} bytes from {start} on, and {nbytes} bytes in all")
    directory, at = read_at(start, size), 0
    members: dict[str, ZipMember] = {}
    for _ in range(count):
        member, at = _entry(path, directory, at)
        if member.name in members:
            _damaged(path, f"has two members {member.name}")
        members[member.name] = member
    placed = {name: _place(path, member, start, read_at) for name, member in members.items()}
    end = 0
    for member in sorted(placed.values(), key=lambda member: (member.offset, member.nbytes)):
        if member.offset < end:
            _damaged(path, f"has a member {member.name} that overlaps another one")
        end = member.offset + member.nbytes
    return placed


def _directory_place(path: Path, nbytes: int, read_at: ReadAt) -> tuple[int, int, int]:
    """Return the directory's offset, bytes and number of members."""
    if nbytes < _END.size:
        _damaged(path, f"is truncated: {nbytes} bytes")
    fields = _END.unpack(read_at(nbytes - _END.size, _END.size))
    if fields[0] != b"PK\5\6":
        _damaged(path, "is truncated: it does not end with the directory of a zip file")
    count, size, start = fields[4:7]
    at = nbytes - _END.size - _LOCATOR.size
    locator = _LOCATOR.unpack(read_at(at, _LOCATOR.size)) if at >= 0 else (b"",)
    if locator[0] == b"PK\6\7":
        if locator[2] + _END64.size > nbytes:
            _damaged(path, f"is truncated: its directory should be at {locator[2]}")
        fields64 = _END64.unpack(read_at(locator[2], _END64.size))
        if fields64[0] != b"PK\6\6":
            _damaged(path, "has a damaged directory")
        count, size, start = fields64[7:10]
    return start, size, count


def _entry(path: Path, directory: bytes, at: int) -> tuple[ZipMember, int]:
    """Return the member with the offset of its local header, and the next entry's place."""
    if at + _ENTRY.size > len(directory):
        _damaged(path, "has a truncated directory")
    fields = _ENTRY.unpack_from(directory, at)
    flags, method, packed, unpacked = fields[3], fields[4], fields[8], fields[9]
    name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
    name_end = at + _ENTRY.size + name_length
    end = name_end + extra_length + comment_length
    if fields[0] != b"PK\1\2" or end > len(directory):
        _damaged(path, "has a damaged directory")
    try:
        name = directory[at + _ENTRY.size : name_end].decode()
    except UnicodeDecodeError:
        _damaged(path, "has a member whose name is not UTF-8")
    if name.startswith("/") or "\\" in name or ".." in name.split("/") or not name.isprintable():
        _damaged(path, f"has a member named {name}", "plain relative names")
    sizes64 = _zip64(directory[name_end : name_end + extra_length])
    unpacked, packed, header = (
        next(sizes64, -1) if value == _FULL32 else value for value in (unpacked, packed, header)
    )  # the order of the zip64 record
    if method != 0 or flags & 1 or packed != unpacked:
        _damaged(path, f"has a member {name} that is compressed or encrypted", "members that are stored, by torch.save")
    if header < 0 or packed < 0:
        _damaged(path, f"has no size of its member {name}")
    return ZipMember(name, header, packed), end


def _zip64(extra: bytes) -> Iterator[int]:
    """Yield the 64-bit numbers of an entry's zip64 record, if it has one."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            record = extra[at + 4 : at + 4 + length]
            for place in range(0, len(record) - 7, 8):
                yield int.from_bytes(record[place : place + 8], "little")
            return
        at += 4 + length


def _place(path: Path, member: ZipMember, directory: int, read_at: ReadAt) -> ZipMember:
    """Return the member with the place of its data, which ends before the directory."""
    if member.offset + _LOCAL.size > directory:
        _damaged(path, f"has no member {member.name} at {member.offset}")
    fields = _LOCAL.unpack(read_at(member.offset, _LOCAL.size))
    start = member.offset + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\3\4" or start + member.nbytes > directory:
        _damaged(path, f"is truncated: its member {member.name} has {member.nbytes:,} bytes from {start:,} on")
    return ZipMember(member.name, start, member.nbytes)


def _damaged(path: Path, what: str, expected: str = "a complete zip file of torch.save") -> NoReturn:
    raise CheckpointError(f"{path} {what}", expected, "download or copy the file again")
