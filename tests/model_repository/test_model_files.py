"""Files beside a model.py, as it imports them: at its top, inside of its functions, by their package; its own alone."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write

TOP = (
    "from . import second\nimport first\n"
    + HEAD
    + """
    def execute(self, requests):
        return [said(f"{first.NAME} {second.NAME} {__package__ == second.__package__}")]
"""
    + SAY
)
INITIALIZE = (
    HEAD
    + """
    def initialize(self, args):
        from first import NAME
        self.name = NAME

    def execute(self, requests):
        return [said(self.name)]
"""
    + SAY
)
EXECUTE = (
    HEAD
    + """
    @staticmethod
    def auto_complete_config(config):
        from . import second
        import first
        assert first.NAME[0] == second.NAME[0]
        return config

    def execute(self, requests):
        import first
        import parts.third
        from parts import third
        first.count += 1
        assert parts.third is third and first.later() is third
        return [said(f"{first.NAME} {first.count} {third.NAME}")]
"""
    + SAY
)


WHATEVER_IMPORTS_THEM = (
    HEAD
    + """
    def execute(self, requests):
        import importlib
        found = importlib.import_module("model")  # as unittest.main("model") of Triton's tests does
        return [said(importlib.import_module("first").NAME + found.__name__ + str(found.pb_utils is pb_utils))]
"""
    + SAY
)


def files(root: Path, name: str, code: str, config: str) -> None:
    later = "def later():\n    import parts.third\n    return parts.third\n"
    write(root, name, code, config, first=f"NAME, count = '{name}1', 0\n{later}", second=f"NAME = '{name}2'\n")
    (root / name / "1" / "parts").mkdir()  # without __init__.py
    (root / name / "1" / "parts" / "third.py").write_text(f"NAME = '{name}3'\n")


@pytest.mark.parametrize("where", ["", OWN], ids=["here", "own"])
def test_each_finds_its_own_whenever_it_imports_them(tmp_path: Path, where: str) -> None:
    for name, code in (("a", TOP), ("b", INITIALIZE), ("c", EXECUTE), ("d", EXECUTE)):
        files(tmp_path, name, code, ANY % where)

    async def run() -> None:
        before, path, finders = dict(sys.modules), list(sys.path), list(sys.meta_path)
        async with loaded(tmp_path) as repository:
            for name in "abcd":
                await repository.load(name)

            async def ask(name: str) -> str:
                model = repository.get(name)
                return str((await model.infer(asked(model, IN=text("x")))).outputs["OUT"][0].decode())

            assert await ask("a") == "a1 a2 True"
            assert await ask("b") == "b1"
            for i in (1, 2, 3):  # imported once, whoever else imported files of these names meanwhile
                assert [await ask(name) for name in "cd"] == [f"c1 {i} c3", f"d1 {i} d3"]
            assert (sys.path, sys.meta_path) == (path, finders)
            assert not {"first", "second", "parts", "parts.third"} & sys.modules.keys()
        left = [name for name in sys.modules if name.startswith("millrace_model") and name not in before]
        assert not left, "models that are gone leave nothing"

    asyncio.run(run())


def test_a_process_of_its_own_has_its_folder_on_the_path(tmp_path: Path) -> None:
    files(tmp_path, "a", WHATEVER_IMPORTS_THEM, ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "a", text("x"))).tolist() == [b"a1modelTrue"]

    asyncio.run(run())
