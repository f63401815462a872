"""Frames and shared memory between a server and a model's process: there and back, and what is no frame."""

import contextlib
import fcntl
import gc
import os
import random
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.python_backend.stub.ipc import FrameError, Frames
from millrace.model_repository.python_backend.stub.shared_memory import Arena, Mapped, _Segment
from millrace.model_repository.request.tensors import Array

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Frames, Frames, socket.socket]]:
    """Two sides, and the socket of the first."""
    ours, theirs = socket.socketpair()
    sides = [Frames(s, Arena(100 * MIB), Mapped(writable)) for s, writable in ((ours, False), (theirs, True))]
    yield sides[0], sides[1], ours
    for side in sides:
        side.close()


def test_pieces_are_given_back_when_nothing_is_seen_of_them(pair: tuple[Frames, Frames, socket.socket]) -> None:
    """Against a model of what is held, with views of views, in any order."""
    left, right, _ = pair
    rng, held = random.Random(1), list[tuple[int, Array]]()
    for i in range(200):
        n = rng.choice([1, 5000, 4097, 70_000, 300_000])
        left.send({"t": "x"}, [("a", np.full(n, i, np.int32))])
        frame = right.read()
        assert frame is not None
        array = frame[1][0][1]
        assert array.shape == (n,) and (array == i).all()
        held.append((i, array[n // 2 :].reshape(1, -1)))
        del frame, array
        rng.shuffle(held)
        while len(held) > rng.randint(0, 8):
            held.pop()
        assert all((view == number).all() for number, view in held), "nothing was written over"
        right.send({"t": "free"})
        left.read()
        in_memory = sum(-(-4 * (view.size * 2) // 64) * 64 for _, view in held if view.size * 2 * 4 > 16 << 10)
        assert left.arena.used_bytes <= in_memory + 64 * len(held) + 8 * len(held)
    held.clear()
    gc.collect()
    right.send({"t": "free"})
    left.read()
    assert left.arena.used_bytes == 0


def test_what_finds_no_room_goes_with_the_frame() -> None:
    ours, theirs = socket.socketpair()
    left, right = Frames(ours, Arena(0), Mapped(False)), Frames(theirs, Arena(0), Mapped(True))
    array = np.arange(20_000, dtype=np.float64)
    left.send({"t": "x"}, [("a", array), ("b", array[:0])])
    frame = right.read()
    assert frame is not None and [a.tolist() for _, a in frame[1]] == [array.tolist(), []]
    frame[1][0][1][:] = 0  # a model may write into it
    left.shut()
    assert right.read() is None
    left.close()
    right.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x05\0\0\0\x05\0\0\0null!", b"\x02\0\0\0\x02\0\0\0{}", b"\x02\0\0\0\xff\xff\0\0{}",
        b'\x26\0\0\0\x26\0\0\0{"segments":[[1,4096]],"tensors":[]}  ',
        b'\x36\0\0\0\x36\0\0\0{"segments":[],"tensors":[["a",11,[4],null,0,16]]}     ',
        b'\x36\0\0\0\x36\0\0\0{"segments":[],"tensors":[["a",11,[4],9,0,16]]}        ',
        b'\x36\0\0\0\x36\0\0\0{"segments":[],"tensors":[["a",99,[4],null,0,0]]}      ',
        b'\x36\0\0\0\x36\0\0\0{"segments":[],"tensors":[["a",11,[4],null,0,0]]}      ',
        b'\x36\0\0\0\x36\0\0\0{"segments":[],"tensors":[],"free":[[7,0]]}            ',
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused(pair: tuple[Frames, Frames, socket.socket], data: bytes) -> None:
    _, right, ours = pair
    ours.sendall(data)
    with pytest.raises(FrameError):
        right.read()


def n_open() -> int:
    """Files of this process that have no name in a folder, as segments have none; other threads open others."""
    n = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            n += "memfd:" in str(entry.readlink())
    return n


@pytest.mark.parametrize(("limit", "value"), [(resource.RLIMIT_FSIZE, MIB), (resource.RLIMIT_NOFILE, 0)])
def test_without_files_a_tensor_goes_with_its_frame(limit: int, value: int) -> None:
    """A process may open none, or none so large: the other side is well, and gets it; nothing is left open."""
    ours, theirs = socket.socketpair()
    left, right = Frames(ours, Arena(100 * MIB), Mapped(False)), Frames(theirs, Arena(0), Mapped(True))
    sent, n_files, before = np.arange(MIB, dtype=np.int32), n_open(), resource.getrlimit(limit)
    sending = threading.Thread(target=left.send, args=({"t": "x"}, [("a", sent)]))
    resource.setrlimit(limit, (value, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large|Too many open files"):
            _Segment(2 * MIB)
        sending.start()
        found = right.read()
        sending.join()
    finally:
        resource.setrlimit(limit, before)
    assert found is not None
    np.testing.assert_array_equal(found[1][0][1], sent)
    gc.collect()
    assert n_open() == n_files
    ours.close()
    theirs.close()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("other", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    mapped = Mapped(writable=False)
    with pytest.raises(ValueError, match="is not sealed"):
        mapped.add(1, fd, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):  # it was closed
        os.fstat(fd)
    segment = _Segment(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(ValueError, match="of another size"):
        mapped.add(1, fcntl.fcntl(segment.fd, fcntl.F_DUPFD_CLOEXEC, 0), 8192)
