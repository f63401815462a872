"""A model that unloads others."""

import asyncio
from pathlib import Path

from tests.support.python_models import ANY, HEAD, SAY, loaded, one, text, write


def test_what_is_not_there_may_be_unloaded(tmp_path: Path) -> None:
    code = "    def execute(self, requests):\n        pb_utils.unload_model('none')\n        return [said('done')]\n"
    write(tmp_path, "bls", HEAD + code + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "bls", text("x")))[0] == b"done"

    asyncio.run(run())
