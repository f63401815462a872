"""Memory that was freed goes back to the system."""

import ctypes

import pytest

from millrace.machine.process_info import release_free_memory, resident_bytes


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_freed_pieces_below_a_held_one_are_released() -> None:
    pieces = [b"\1" * 60_000 for _ in range(1200)]
    held = b"\1" * 60_000  # at the end of the heap, which cannot shrink below it
    del pieces
    before = resident_bytes()
    release_free_memory()
    assert before - resident_bytes() > 40 << 20
    assert held
