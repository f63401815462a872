"""Writes SentencePiece's `ModelProto` in protobuf's wire format, with the fields that a BPE vocabulary needs.

    ModelProto      1 pieces (repeated), 2 trainer_spec, 3 normalizer_spec
    SentencePiece   1 piece (string), 2 score (float), 3 type (enum)
    TrainerSpec     3 model_type (2 is BPE), 35 byte_fallback
    NormalizerSpec  1 name (string), 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces

source: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from millrace.protobuf import FIXED32, VARINT, bytes_field, key, varint

UNKNOWN, UNUSED = 2, 5
_BPE = 2


class VocabularyPiece(NamedTuple):
    text: str
    score: float
    type: int  # SentencePiece's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte


def encode_model(pieces: Sequence[VocabularyPiece], *, byte_fallback: bool, prefix: bool) -> bytes:
    """Return a model that SentencePiece can load. prefix: put a space before each text"""
    trainer = _number(3, _BPE) + _number(35, byte_fallback)
    normalizer = bytes_field(1, b"identity") + _number(3, prefix) + _number(4, False) + _number(5, True)
    return b"".join(bytes_field(1, _piece(p)) for p in pieces) + bytes_field(2, trainer) + bytes_field(3, normalizer)


def _piece(piece: VocabularyPiece) -> bytes:
    score = key(2, FIXED32) + struct.pack("<f", piece.score)
    return bytes_field(1, piece.text.encode()) + score + _number(3, piece.type)


def _number(field: int, value: int) -> bytes:
    return key(field, VARINT) + varint(value)
