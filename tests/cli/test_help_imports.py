"""`--help` is quick since it imports no more than the options need: judged by modules, not by a clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.bench.client.endpoints import ENDPOINTS
from millrace.bench.names import ENDPOINT_NAMES
from millrace.cli.main import COMMANDS
from millrace.compress.presets import ABOUT
from millrace.compress.recipe import PRESETS
from tests.support.command_line import environment

PARTS = ("bench sweep", "bench compare", "bench infer", "size fit", "size verify")
# What takes tens of milliseconds to import, and no option is made of.
HEAVY = {
    "numpy", "msgspec", "jinja2", "asyncio", "uvloop", "multiprocessing", "ctypes", "ssl", "http", "email", "yaml",
    "subprocess", "concurrent", "tomllib", "starlette", "uvicorn", "grpc", "rich", "llguidance",
}  # fmt: skip
CODE = """
import contextlib, io, json, sys
from millrace.cli.main import run
found = {}
for verb in sys.argv[1:]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = run([*verb.split(), "--help"])
    found[verb] = [code, len(shown.getvalue()), sorted({m.split(".")[0] for m in sys.modules}), len(sys.modules)]
print(json.dumps(found))
"""


def test_no_verb_imports_what_only_running_it_needs(cache: Path) -> None:
    """All of them in one process: what one imports stays, so that the first line that names it is the verb's."""
    verbs = (*COMMANDS, *PARTS)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *verbs], check=True, env=environment(cache), capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert set(found) == set(verbs)
    for verb, (code, length, modules, n_modules) in found.items():
        assert code == 0 and length > 200, verb
        assert not HEAVY & set(modules), f"{verb} --help imports {HEAVY & set(modules)}"
        assert n_modules < 264, f"after {verb} --help there are {n_modules} modules"


def test_what_help_names_is_what_there_is() -> None:
    assert tuple(ENDPOINTS) == ENDPOINT_NAMES and list(ABOUT) == list(PRESETS)


@pytest.mark.parametrize("verb", ["compress", "size"])
def test_help_still_says_what_there_is(verb: str, cache: Path) -> None:
    code = f"from millrace.cli.main import run; run([{verb!r}, '--help'])"
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment(cache), capture_output=True, text=True
    ).stdout
    wanted = {"compress": [*PRESETS, "--advise", "--max-loss", "--mmlu"], "size": ["--rate", "fit", "verify"]}
    assert all(word in shown for word in wanted[verb])
