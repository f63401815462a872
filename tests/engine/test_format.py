"""What an engine's files hold is what its format number says: who changes the one raises the other."""

import hashlib

import msgspec

from millrace.engine.manifest import FORMAT, Manifest
from millrace.engine.tables import GraphTable, ProgramTable
from millrace.engine.tactics import TacticTable

WRITTEN = {12: "537d78fa6a990c8b"}


def test_other_files_are_another_format() -> None:
    """Else an engine of before, in somebody's cache, is opened and then misread."""
    schema = msgspec.json.encode(
        [msgspec.json.schema(kind) for kind in (Manifest, ProgramTable, GraphTable, TacticTable)], order="sorted"
    )
    found = hashlib.blake2b(schema, digest_size=8).hexdigest()
    assert WRITTEN.get(FORMAT) == found, f'raise FORMAT, and write {{FORMAT: "{found}"}} here'
