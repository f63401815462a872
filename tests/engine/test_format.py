"""What an engine's files hold is what its format number says: who changes the one raises the other."""

import hashlib
import re
from enum import Enum
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from millrace.engine.artifact.engine_tables import GraphTable, ProgramTable
from millrace.engine.artifact.manifest import FORMAT, Manifest
from millrace.engine.artifact.tactics import TacticTable

WRITTEN = {13: "02ef0b9a45e402c3"}


def test_other_files_are_another_format() -> None:
    """Else an engine of before, in somebody's cache, is opened and then misread."""
    found = dict[str, str]()
    for kind in (Manifest, ProgramTable, GraphTable, TacticTable):
        describe(kind, found)
    digest = hashlib.blake2b("\n".join(f"{k}: {found[k]}" for k in sorted(found)).encode(), digest_size=8).hexdigest()
    assert WRITTEN.get(FORMAT) == digest, f'raise FORMAT, and write {{FORMAT: "{digest}"}} here'


def describe(kind: Any, found: dict[str, str]) -> None:
    """Into `found`, what is written of a structure, and of those that it holds: names as in files, types, tags."""
    for part in get_args(kind):
        describe(part, found)
    if isinstance(kind, type) and issubclass(kind, Enum):
        found[kind.__name__] = repr(list(kind))
    if not isinstance(kind, type) or not issubclass(kind, Struct) or kind.__name__ in found:
        return
    hints, config = get_type_hints(kind), kind.__struct_config__
    names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    written = [f"{name} {re.sub(r'[a-z_]+[.]', '', str(hints[field]))}" for name, field in names]
    found[kind.__name__] = f"{config.tag} {config.array_like} {config.omit_defaults} {written}"
    for hint in hints.values():
        describe(hint, found)
