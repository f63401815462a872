"""How a good file becomes a bad one: bytes, numbers in bytes, and JSON values."""

import json
import struct
from random import Random
from typing import Any

_POWERS = (7, 8, 16, 24, 31, 32, 61, 63, 64)
_NUMBERS = (0, 1, 2, 7, *(2**n + d for n in _POWERS for d in (-1, 0)))
_ODD_NUMBERS = (10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"), 1e-320)
_STRINGS = (
    "", " ", "x" * 3000, "\x00", "\x1b[31mred\x1b[0m", "\ud800", "\u202e", "é" * 400, "../../etc/passwd", "a\nb",
    "%s{}", "<s>", "float32", "default", "llama3", "true", "-1", "9" * 400,
)  # fmt: skip


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """One to four changes, most of them small."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(out) + 1) if rng.random() < 0.7 else rng.randrange(min(len(out), 256) + 1)
        size = rng.choice([1, 1, 2, 4, 8, 16, rng.randrange(1, 200)])
        match rng.randrange(8):
            case 0 | 1:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 2 | 3:
                width, value = rng.choice([4, 8]), rng.choice(_NUMBERS)
                at -= at % rng.choice([1, 4, 8])
                out[at : at + width] = struct.pack("<Q", value % 2**64)[:width]
            case 4:
                del out[at : at + size]
            case 5:
                out[at:at] = rng.randbytes(size)
            case 6:
                other = rng.randrange(len(out) + 1)
                out[at : at + size] = out[other : other + size]
            case _:
                del out[at:]
    return bytes(out)


def mutate_json(rng: Random, value: Any) -> Any:
    """A copy in which one to three places hold something else, are gone, or have another name."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(copy))
        if not places:
            return strange(rng)
        # keys near the top matter most: half of the time one of those
        holder, key = rng.choice(places if rng.random() < 0.5 else places[: max(8, len(places) // 20)])
        match rng.randrange(6):
            case 0 | 1 | 2:
                holder[key] = strange(rng, holder[key])
            case 3:
                del holder[key]
            case 4:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name]))
            case _:
                if isinstance(holder, dict):
                    name = rng.choice([f"{key}x", str(key)[:-1], str(key).upper(), rng.choice(_STRINGS)])
                    holder[name] = holder.pop(key)
                else:
                    holder.insert(key, strange(rng))
    return copy


def _places(value: Any) -> Any:
    """(holder, key) of each value inside, breadth first, at most 5,000."""
    level, seen = [value], 0
    while level and seen < 5000:
        below = []
        for holder in level:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            for key in keys:
                yield holder, key
                seen += 1
                if isinstance(holder[key], dict | list):
                    below.append(holder[key])
        level = below


def strange(rng: Random, was: Any = None) -> Any:
    """A value of any type; half of the time one of the type that was there."""
    if isinstance(was, bool | None) or rng.random() < 0.5:
        kind = rng.randrange(6)
    else:
        kind = 1 if isinstance(was, int | float) else 2 if isinstance(was, str) else rng.randrange(6)
    match kind:
        case 0:
            return rng.choice([None, True, False])
        case 1:
            near: list[Any] = [was + 1, was - 1, -was, was * 2] if isinstance(was, int) else []
            big = rng.choice(_NUMBERS)
            return rng.choice([*near, big, -big, *_ODD_NUMBERS])
        case 2:
            near = [was[:-1], was + "x", was.upper(), was[::-1], was * 50] if isinstance(was, str) else []
            return rng.choice([*near, *_STRINGS])
        case 3:
            return rng.choice([[], [[]], [None] * 3, [0] * 3000, ["a", 1, None], [was], [was] * 3])
        case 4:
            return rng.choice([{}, {"": 0}, {"a": {"b": []}}, {str(i): i for i in range(500)}, {"type": was}])
        case _:
            return nested(rng.choice([3, 60, 300]), rng.random() < 0.5)


def nested(depth: int, lists: bool) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def json_bytes(rng: Random, value: Any) -> bytes:
    """As text; now and then with other spellings, and with broken bytes."""
    data = json.dumps(value, indent=rng.choice([None, None, 1])).encode()
    match rng.randrange(20):
        case 0:
            return b"\xef\xbb\xbf" + data
        case 1:
            return data.decode().encode("utf-16")
        case 2 | 3:
            return mutate_bytes(rng, data)
        case 4:
            depth = rng.choice([500, 5000, 100_000])
            return b"[" * depth + b"]" * (depth if rng.random() < 0.5 else 0)
        case 5 if isinstance(value, dict) and value:  # a name twice
            name = rng.choice(list(value))
            return data[:-1].rstrip() + b"," + json.dumps({name: strange(rng, value[name])}).encode()[1:]
    return data
