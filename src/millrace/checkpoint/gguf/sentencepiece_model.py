"""SentencePiece's `ModelProto`, as far as a BPE vocabulary needs it, in protobuf's wire format.

    ModelProto      1 pieces (repeated), 2 trainer_spec, 3 normalizer_spec
    SentencePiece   1 piece (string), 2 score (float), 3 type (enum)
    TrainerSpec     3 model_type (2 is BPE), 35 byte_fallback
    NormalizerSpec  1 name (string), 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces

source: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

UNKNOWN, UNUSED = 2, 5
_VARINT, _BYTES, _FLOAT = 0, 2, 5  # wire types
_BPE = 2


class Piece(NamedTuple):
    text: str
    score: float
    type: int  # SentencePiece's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte


def encode_model(pieces: Sequence[Piece], *, byte_fallback: bool, prefix: bool) -> bytes:
    """A model that SentencePiece can load; `prefix`: a space is put in front of a text."""
    trainer = _number(3, _BPE) + _number(35, byte_fallback)
    normalizer = _bytes(1, b"identity") + _number(3, prefix) + _number(4, False) + _number(5, True)
    return b"".join(_bytes(1, _piece(p)) for p in pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def _piece(piece: Piece) -> bytes:
    score = bytes([2 << 3 | _FLOAT]) + struct.pack("<f", piece.score)
    return _bytes(1, piece.text.encode()) + score + _number(3, piece.type)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
