"""What a model.py imports: the packages that Triton's users have, and modules that raise where they are looked at."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.python_models import ANY, HEAD, SAY, loaded, one, text, write

# By package: a text that its code computes, where that is one line.
PACKAGES = {
    "torch": ("str(torch.arange(4).reshape(2, 2).sum(0).tolist())", "[2, 4]"),
    "transformers": ("transformers.BertConfig(hidden_size=24).model_type", "bert"),
    "tokenizers": ("str(tokenizers.pre_tokenizers.Whitespace().pre_tokenize_str('a b')[1][0])", "b"),
    "cv2": ("str(cv2.resize(np.zeros((4, 6), np.uint8), (3, 2)).shape)", "(2, 3)"),
    "sklearn.linear_model": (
        "str(sklearn.linear_model.LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0]).predict([[2.0]]).round(3))", "[5.]"
    ),
    "onnxruntime": ("str('CPUExecutionProvider' in onnxruntime.get_available_providers())", "True"),
}  # fmt: skip
AT_TOP = "import {0}\n" + HEAD + "    def execute(self, requests):\n        return [said({1})]\n" + SAY
IN_INITIALIZE = (
    HEAD
    + "    def initialize(self, args):\n        global {0}\n        import {2}\n"
    + "    def execute(self, requests):\n        return [said({1})]\n"
    + SAY
)
PLAIN = HEAD + "    def execute(self, requests):\n        return [said('plain')]\n" + SAY


@pytest.mark.parametrize("package", PACKAGES)
def test_a_model_imports_what_its_users_have(tmp_path: Path, package: str) -> None:
    """At its top and in `initialize`; models that are loaded after it find nothing in their way."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    code, expected = PACKAGES[package]
    write(tmp_path, "at_top", AT_TOP.format(package, code), ANY % "")
    write(tmp_path, "initialize", IN_INITIALIZE.format(package.partition(".")[0], code, package), ANY % "")
    write(tmp_path, "plain", PLAIN, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name, answer in (("at_top", expected), ("initialize", expected), ("plain", "plain")):
                assert (await one(repository, name, text("x"))).tolist() == [answer.encode()], name

    asyncio.run(run())


# Modules as lazy packages make them: reading an attribute raises, whatever it is, or runs an import.
LAZY = """
import sys
from types import ModuleType


class Raising(ModuleType):
    def __getattr__(self, name):
        raise {0}(f"no {{name}} here")


class Importing(ModuleType):
    def __getattr__(self, name):
        import {1}
        return getattr({1}, name)


class Untrue:
    def __getattribute__(self, name):
        raise {0}(f"not even {{name}}")

    def __eq__(self, other):
        raise {0}("no comparison")

    __hash__ = None


class WithPath(ModuleType):
    @property
    def __path__(self):
        raise {0}("no path")

    @property
    def __file__(self):
        raise {0}("no file")


for made in (Raising("raising_{0}"), Importing("importing_{0}"), WithPath("path_{0}")):
    sys.modules[made.__name__] = made
sys.modules["untrue_{0}"] = Untrue()
sys.modules["none_{0}"] = None
"""


@pytest.mark.parametrize("kind", ["RuntimeError", "ImportError", "KeyError", "SystemExit", "ZeroDivisionError"])
def test_modules_that_raise_do_not_fail_a_model(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "lazy", LAZY.format(kind, "there_is_no_such_module") + PLAIN, ANY % "")
    write(tmp_path, "plain", PLAIN, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("lazy", "plain"):
                assert (await one(repository, name, text("x"))).tolist() == [b"plain"], name

    made = [f"{name}_{kind}" for name in ("raising", "importing", "path", "untrue", "none")]
    try:
        asyncio.run(run())
        assert all(name in sys.modules for name in made), "they belong to no model"
    finally:
        for name in made:
            sys.modules.pop(name, None)
    assert importlib.util.find_spec("there_is_no_such_module") is None
