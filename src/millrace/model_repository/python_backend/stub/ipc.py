"""Frames between server and stub over a socket: JSON followed by tensors, large ones in shared memory.

A frame consists of a mark, its length and its JSON's length in 4 bytes each, the JSON, and the bytes of small tensors.
Nothing is pickled. Other data on the socket, which a model's code could write, is detected, and waits are bounded.
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

from .bytes_tensors import Array, join_strings, objects, split_strings
from .shared_memory import Arena, Mapped
from .tensors import NAMES, NUMBERS, TYPES

_HEAD = struct.Struct("<4sII")
_MARK = b"\xf1MR\x01"
FRAME_TIMEOUT_S = 20.0  # for the rest of a frame
_SMALL = 16 << 10  # bytes up to which a tensor is sent inline
_MAX_INLINE_BYTES = 1 << 31  # if shared memory is full
_READ, _MAX_FILES = 64 << 10, 16
_STRING = 13
_MANY = 16  # pieces of shared memory
Named = tuple[str, Array]


class FrameError(Exception):
    """Data that is not a valid frame."""


class Frames:
    """A frame connection: sent from any thread and from destructors, read by one thread."""

    def __init__(self, connection: socket.socket, arena: Arena, mapped: Mapped) -> None:
        seconds, part = divmod(FRAME_TIMEOUT_S, 1)
        patience = struct.pack("@ll", int(seconds), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        self._socket, self.arena, self._mapped = connection, arena, mapped
        self._lock = threading.RLock()  # reentrant, because a destructor may run during a send
        self._deleted_segments: deque[int] = deque()
        self._files: deque[int] = deque()  # received descriptors of segments announced next
        self._unread = bytearray()
        self._holder: int | None = None  # the thread whose frames are buffered
        self._pending: list[bytes] = []
        self._pending_files: list[int] = []

    def hold(self) -> None:
        """Buffer this thread's frames until one with `last`, so that the reader wakes up once."""
        self._holder = threading.get_ident()

    def send(self, header: dict[str, Any], tensors: Sequence[Named] = (), last: bool = False) -> None:
        """Send a frame. last: end of buffering. raises OSError if the peer is gone, FrameError if too large"""
        tail: list[bytes] = []
        files: list[int] = []
        segments: list[tuple[int, int]] = []
        with self._lock:
            at, descriptions = 0, []
            for name, array in tensors:
                number = NUMBERS[array.dtype]
                data: Array = array
                if number == _STRING:
                    data = np.frombuffer(join_strings(array.reshape(-1)), np.uint8)
                put = self.arena.put(data) if data.nbytes > _SMALL else None
                if put is None:
                    descriptions.append([name, number, array.shape, None, at, data.nbytes])
                    tail.append(data.tobytes())
                    at += data.nbytes
                    continue
                place, new = put
                descriptions.append([name, number, array.shape, place[0], place[1], data.nbytes])
                if new is not None:
                    files.append(new[0])
                    segments.append((place[0], new[1]))
            if last:
                self._holder = None
            self._write({**header, "tensors": descriptions, "segments": segments}, b"".join(tail), files)

    def _write(self, header: dict[str, Any], tail: bytes, files: list[int]) -> None:
        for key, left in (("free", self._mapped.released), ("gone", self._deleted_segments)):
            if left:
                header[key] = [left.popleft() for _ in range(len(left))]
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + len(tail) > _MAX_INLINE_BYTES:
            raise FrameError(f"{len(text) + len(tail)} bytes beside shared memory, which has no room for them")
        self._pending += (_HEAD.pack(_MARK, len(text) + len(tail), len(text)), text, tail)
        self._pending_files += files
        if self._holder == threading.get_ident():
            return
        data, files = b"".join(self._pending), self._pending_files  # in order: frames announce segments
        self._pending, self._pending_files = [], []
        if files:
            sent = socket.send_fds(self._socket, [data[:_READ]], files)
            self._socket.sendall(data[sent:])
        else:
            self._socket.sendall(data)

    def settle(self) -> None:
        """Return released shared memory to the peer if much has accumulated without a frame to carry it."""
        if len(self._mapped.released) > _MANY:
            self.send({"t": "free"})

    def read(self) -> tuple[dict[str, Any], list[Named]] | None:
        """Read a frame; None if the peer is gone. raises FrameError, OSError"""
        while True:
            size = self._frame_size()
            if size is not None and len(self._unread) >= size:
                return self._pop_frame(size)
            if not self._receive(size):
                return None

    def _frame_size(self) -> int | None:
        """Return the size of the next frame; None if not yet known. raises FrameError"""
        if not _MARK.startswith(bytes(self._unread[: len(_MARK)])):
            raise FrameError(
                f"{bytes(self._unread[:16])!r} is not the start of a message: does the model write to this socket?"
            )
        if len(self._unread) < _HEAD.size:
            return None
        _, size, n_text = _HEAD.unpack_from(self._unread)
        if size > _MAX_INLINE_BYTES or n_text > size:
            raise FrameError(f"a message of {size} bytes with a head of {n_text}")
        return int(_HEAD.size + size)

    def _receive(self, size: int | None) -> bool:
        """Receive data; False if the peer is gone. raises FrameError, OSError"""
        missing = max(_READ, (size or 0) - len(self._unread))
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, min(missing, 1 << 20), _MAX_FILES)
                break
            except BlockingIOError:  # nothing arrived within FRAME_TIMEOUT_S
                if self._unread:
                    raise FrameError("the rest of a message did not come in time") from None
        self._files.extend(files)
        self._unread += data
        return bool(data)

    def _pop_frame(self, size: int) -> tuple[dict[str, Any], list[Named]]:
        """Remove one frame from the received data and decode it."""
        n_text = _HEAD.unpack_from(self._unread)[2]
        end = _HEAD.size + n_text
        try:
            header = json.loads(self._unread[_HEAD.size : end])
            tail = bytearray(memoryview(self._unread)[end:size])
            for number, n_bytes in header.pop("segments"):
                self._mapped.add(number, self._files.popleft(), n_bytes)
            descriptions = header.pop("tensors")
            tensors = [self._tensor(description, tail) for description in descriptions]
            for number in header.pop("gone", ()):
                self._mapped.remove(number)
            if "free" in header:
                self._deleted_segments.extend(self.arena.give_back(header.pop("free")))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise FrameError(f"{type(error).__name__}: {error}") from error
        del self._unread[:size]
        return header, tensors

    def _tensor(self, description: list[Any], tail: bytearray) -> Named:
        name, number, shape, segment, at, n_bytes = description
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
        """Shut the socket down: both readers see the end, and the reader here closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Arrays that were read stay valid."""
        self._socket.close()
