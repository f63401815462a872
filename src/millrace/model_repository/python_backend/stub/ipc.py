"""What two processes say to each other over a socket: JSON with tensors behind it, large ones in shared memory.

A frame is a mark, its length and its JSON's in four bytes each, the JSON, and the bytes of small tensors. Nothing is
pickled. What else comes, for a model's code has the socket, too, is told apart from a frame, and waited for only so
long.
"""

import contextlib
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .bytes_tensors import Array, joined_strings, objects, split_strings
from .shared_memory import Arena, Mapped
from .tensors import NAMES, NUMBERS, TYPES

_HEAD = struct.Struct("<4sII")
_MARK = b"\xf1MR\x01"
PATIENCE_S = 20.0  # with the rest of a frame
_SMALL = 16 << 10  # bytes of a tensor that goes with the frame
_MOST_INLINE = 1 << 31  # where there is no room in shared memory
_READ, _MOST_FILES = 64 << 10, 16
_STRING = 13
_MANY = 16  # pieces of shared memory
Named = tuple[str, Array]


class FrameError(Exception):
    """What came is no frame of ours."""


class Frames:
    """Sent from any thread, and from destructors; read by one thread."""

    def __init__(self, connection: socket.socket, arena: Arena, mapped: Mapped) -> None:
        seconds, part = divmod(PATIENCE_S, 1)
        patience = struct.pack("@ll", int(seconds), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        self._socket, self.arena, self._mapped = connection, arena, mapped
        self._lock = threading.RLock()  # a destructor may come in the middle of a send; each is one write
        self._gone: deque[int] = deque()
        self._files: deque[int] = deque()  # that came, and belong to segments told of next
        self._unread = bytearray()
        self._holder: int | None = None  # the thread whose frames go out with its next that is not held
        self._held: list[bytes] = []
        self._held_files: list[int] = []

    def hold(self) -> None:
        """What this thread sends goes out with the last of it, in one write: whoever reads wakes up once."""
        self._holder = threading.get_ident()

    def send(self, header: dict[str, Any], tensors: Sequence[Named] = (), last: bool = False) -> None:
        """last: of what was held. raises OSError where nobody reads any more, FrameError for what no frame can have"""
        tail: list[bytes] = []
        files: list[int] = []
        segments: list[tuple[int, int]] = []
        with self._lock:
            at, told = 0, []
            for name, array in tensors:
                number = NUMBERS[array.dtype]
                data: Array = array
                if number == _STRING:
                    data = np.frombuffer(joined_strings(array.reshape(-1)), np.uint8)
                put = self.arena.put(data) if data.nbytes > _SMALL else None
                if put is None:
                    told.append([name, number, array.shape, None, at, data.nbytes])
                    tail.append(data.tobytes())
                    at += data.nbytes
                    continue
                place, new = put
                told.append([name, number, array.shape, place[0], place[1], data.nbytes])
                if new is not None:
                    files.append(new[0])
                    segments.append((place[0], new[1]))
            if last:
                self._holder = None
            self._write({**header, "tensors": told, "segments": segments}, b"".join(tail), files)

    def _write(self, header: dict[str, Any], tail: bytes, files: list[int]) -> None:
        for key, left in (("free", self._mapped.released), ("gone", self._gone)):
            if left:
                header[key] = [left.popleft() for _ in range(len(left))]
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + len(tail) > _MOST_INLINE:
            raise FrameError(f"{len(text) + len(tail)} bytes beside shared memory, which has no room for them")
        self._held += (_HEAD.pack(_MARK, len(text) + len(tail), len(text)), text, tail)
        self._held_files += files
        if self._holder == threading.get_ident():
            return
        data, files = b"".join(self._held), self._held_files  # frames in their order: they tell of segments
        self._held, self._held_files = [], []
        if files:
            sent = socket.send_fds(self._socket, [data[:_READ]], files)
            self._socket.sendall(data[sent:])
        else:
            self._socket.sendall(data)

    def settle(self) -> None:
        """Let the other side have its memory back where much of it was let go of, and no frame is at hand."""
        if len(self._mapped.released) > _MANY:
            self.send({"t": "free"})

    def read(self) -> tuple[dict[str, Any], list[Named]] | None:
        """None: the other side is gone. raises FrameError, OSError"""
        while True:
            size = self._frame_size()
            if size is not None and len(self._unread) >= size:
                return self._taken(size)
            if not self._receive(size):
                return None

    def _frame_size(self) -> int | None:
        """None: it is not known yet. raises FrameError"""
        if not _MARK.startswith(bytes(self._unread[: len(_MARK)])):
            raise FrameError(
                f"{bytes(self._unread[:16])!r} is not the start of a message: does the model write to this socket?"
            )
        if len(self._unread) < _HEAD.size:
            return None
        _, size, n_text = _HEAD.unpack_from(self._unread)
        if size > _MOST_INLINE or n_text > size:
            raise FrameError(f"a message of {size} bytes with a head of {n_text}")
        return int(_HEAD.size + size)

    def _receive(self, size: int | None) -> bool:
        """False: the other side is gone. raises FrameError, OSError"""
        missing = max(_READ, (size or 0) - len(self._unread))
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, min(missing, 1 << 20), _MOST_FILES)
                break
            except BlockingIOError:  # nothing came for so long
                if self._unread:
                    raise FrameError("the rest of a message did not come in time") from None
        self._files.extend(files)
        self._unread += data
        return bool(data)

    def _taken(self, size: int) -> tuple[dict[str, Any], list[Named]]:
        """One frame off the beginning of what was read."""
        n_text = _HEAD.unpack_from(self._unread)[2]
        end = _HEAD.size + n_text
        try:
            header = json.loads(self._unread[_HEAD.size : end])
            tail = bytearray(memoryview(self._unread)[end:size])
            for number, n_bytes in header.pop("segments"):
                self._mapped.add(number, self._files.popleft(), n_bytes)
            told = header.pop("tensors")
            tensors = [self._tensor(one, tail) for one in told]
            for number in header.pop("gone", ()):
                self._mapped.remove(number)
            if "free" in header:
                self._gone.extend(self.arena.give_back(header.pop("free")))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise FrameError(f"{type(error).__name__}: {error}") from error
        del self._unread[:size]
        return header, tensors

    def _tensor(self, told: list[Any], tail: bytearray) -> Named:
        name, number, shape, segment, at, n_bytes = told
        if number not in TYPES:
            raise FrameError(f"tensor '{name}' of {NAMES[number]}: install ml_dtypes where the model runs")
        data: Array
        if segment is None:
            data = np.frombuffer(tail, np.uint8, n_bytes, at) if n_bytes else np.empty(0, np.uint8)
        else:
            data = self._mapped.view((segment, at), n_bytes)
        if number == _STRING:
            return name, objects(split_strings(data.tobytes())).reshape(shape)
        if prod(shape) * np.dtype(TYPES[number]).itemsize != n_bytes:
            raise FrameError(f"tensor '{name}' of {n_bytes} bytes and shape {shape}")
        return name, data.view(TYPES[number]).reshape(shape)

    def shut(self) -> None:
        """The other side reads the end; so does who reads here, and closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody reads or sends any more. Arrays that were read stay."""
        self._socket.close()
