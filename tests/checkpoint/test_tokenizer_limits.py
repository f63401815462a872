"""Tokenizer files under a limit of memory: cut off anywhere or too large, they are refused and end no process."""

import base64
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from millrace.checkpoint.gguf.sentencepiece_model import VocabularyPiece, encode_model
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.errors import CheckpointError
from millrace.protobuf import bytes_field
from tests.support.vocabularies import save_byte_level, save_sentencepiece

# Opens every prefix of the file named, in one process that may take so many bytes more than it has.
_CHILD = """
import json, resource, sys
from collections import Counter
from pathlib import Path
from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer
from millrace.errors import CheckpointError
import millrace.checkpoint.tokenizer.hf_json_tokenizer, millrace.checkpoint.tokenizer.sentencepiece_tokenizer

path, room, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
good = path.read_bytes()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
results = Counter()
for cut in [*range(0, len(good), step), len(good)]:
    try:
        make_tokenizer({path.name: good[:cut]}, path.parent)
        results["whole" if cut == len(good) else "opened"] += 1
    except CheckpointError as error:
        reasons = ("not JSON", "ends outside", "address space")
        results[next((reason for reason in reasons if reason in str(error)), "library")] += 1
print(json.dumps(results))
"""


def opened(path: Path, room: int, step: int = 1) -> Counter[str]:
    """How many prefixes of a file were opened, or refused for which reason."""
    command = [sys.executable, "-c", _CHILD, str(path), str(room), str(step)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, (child.returncode, child.stderr[-500:])
    return Counter(json.loads(child.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="a process's address space is known on Linux")
def test_every_prefix_of_a_tokenizer_json_is_refused(tmp_path: Path) -> None:
    save_byte_level(tmp_path, 300)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes().rstrip())
    assert opened(path, 24 << 20) == {"not JSON": path.stat().st_size, "whole": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="a process's address space is known on Linux")
def test_every_prefix_of_a_tokenizer_model_is_refused_or_opened(tmp_path: Path) -> None:
    """One that ends between two fields is a protobuf message: the library looks for what is missing."""
    save_sentencepiece(tmp_path, 400)
    path = tmp_path / "tokenizer.model"
    found = opened(path, 24 << 20)
    assert found["whole"] == 1 and found.total() == path.stat().st_size + 1
    assert found["ends outside"] >= path.stat().st_size - 410  # 400 pieces, and the specifications


LONG = {"type": "Replace", "pattern": {"String": "h"}, "content": "h" * 50}
MILD = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
CHARSMAP = base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"ab\0" + b"h" * 2000 + b"\0").decode()


@pytest.mark.parametrize(("parts", "says"), [
    ([LONG] * 6, "1.56e\\+10 times"), ([LONG] * 2, "2.5e\\+03 times"),
    ([{"type": "Sequence", "normalizers": [LONG]}] * 3, "times"),
    ([{"type": "Replace", "pattern": {"Regex": ""}, "content": "h" * 2000}], "times"),
    ([{"type": "Precompiled", "precompiled_charsmap": CHARSMAP}], "times"),
    ([LONG], ""), ([MILD] * 3, ""), ([{"type": "Prepend", "prepend": "x"}, {"type": "NFKC"}], ""),
])  # fmt: skip
def test_a_normalizer_without_bounds_is_refused(tmp_path: Path, parts: list[dict[str, object]], says: str) -> None:
    save_byte_level(tmp_path, 300)
    path = tmp_path / "tokenizer.json"
    normalizer = {"type": "Sequence", "normalizers": parts}
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normalizer}))
    if says:
        with pytest.raises(CheckpointError, match=says):
            open_tokenizer(tmp_path)
    else:
        open_tokenizer(tmp_path)


def test_a_character_map_of_sentencepiece_is_bounded_too(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path, 400)
    path = tmp_path / "tokenizer.model"
    good, charsmap = path.read_bytes(), base64.b64decode(CHARSMAP)
    path.write_bytes(good + bytes_field(3, bytes_field(2, charsmap)))
    with pytest.raises(CheckpointError, match="2e\\+03 times"):
        open_tokenizer(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="a process's address space is known on Linux")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_needs_more_than_the_limit_is_refused(tmp_path: Path, name: str) -> None:
    """The library alone would end the process, with "memory allocation failed"."""
    pieces = [f"token{i}" for i in range(60_000)]
    if name == "tokenizer.json":
        model = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces]}
        table = {"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
        (tmp_path / name).write_text(json.dumps(table))
    else:
        listed = [VocabularyPiece("<unk>", 0.0, 2), *(VocabularyPiece(piece, -1.0, 1) for piece in pieces)]
        (tmp_path / name).write_bytes(encode_model(listed, byte_fallback=False, prefix=True))
    size = (tmp_path / name).stat().st_size
    assert opened(tmp_path / name, 12 << 20, size) == Counter(
        {"not JSON": 1, "address space": 1} if name == "tokenizer.json" else {"address space": 2}
    )
    assert opened(tmp_path / name, 512 << 20, size)["whole"] == 1


def lengths(field: bytes) -> bytes:
    return (
        encode_model(
            [VocabularyPiece("<unk>", 0.0, 2), VocabularyPiece("a", -1.0, 1)], byte_fallback=False, prefix=True
        )
        + field
    )


@pytest.mark.parametrize(
    "field",
    [
        b"\x0a\xff\xff\xff\xff\x07",  # a piece of 2 GiB
        b"\x1a\x06\x12\xff\xff\xff\xff\x07",  # a normalizer's table of 2 GiB
        b"\x0a" + b"\xff" * 10,  # a length that does not end
        b"\x0b",  # a group, which the format does not have
        b"\x11\x00",  # 8 bytes
        b"\x15\x00",  # 4 bytes
        b"\x80",  # the first byte of a field's number
    ],
)
def test_a_field_that_ends_outside_the_file_is_refused(tmp_path: Path, field: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(lengths(b""))
    assert open_tokenizer(tmp_path).vocab_size == 2
    (tmp_path / "tokenizer.model").write_bytes(lengths(field))
    with pytest.raises(CheckpointError, match="a field ends outside its"):
        open_tokenizer(tmp_path)
