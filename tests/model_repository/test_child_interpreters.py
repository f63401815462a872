"""The interpreter and the environment that a model has of its own, and models that do not start there."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_children import SLEEPS
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write


def environment(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


FAILS = [
    (environment("MILLRACE_PROCESS", "mine"), "MILLRACE_PROCESS of model 'm' is 'mine': expected own or server"),
    (environment("EXECUTION_ENV_PATH", "env"), "'env', is a relative path: begin it with / or $$TRITON_MODEL_"),
    (environment("EXECUTION_ENV_PATH", "/none"), "is neither an environment's folder nor an interpreter"),
    (environment("EXECUTION_ENV_PATH", "/etc"), "is a folder without bin/python"),
    (environment("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/../bin"), "has .. in it: name the folder itself"),
    (environment("EXECUTION_ENV_PATH", "/env.tar.gz"), "is an archive: unpack it, and name its folder"),
    (environment("EXECUTION_ENV_PATH", sys.executable) + environment("MILLRACE_PROCESS", "server"), "leave out one"),
    (environment("EXECUTION_ENV_PATH", "/bin/false"), "its process ended with code 1"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "says"), FAILS)
def test_interpreters_that_run_no_model(tmp_path: Path, more: str, says: str) -> None:
    write(tmp_path, "m", HEAD + SLEEPS + SAY, ANY % more)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await repository.load("m")
            assert says in str(failed.value)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('not here')", "ImportError: not here; at model.py(1): <module>"),
        ("import os; print('last words'); os._exit(3)", "its process ended with code 3: last words"),
        ("import nowhere_to_be", "No module named 'nowhere_to_be'; at model.py(1): <module>; install its package into"),
        (HEAD + "    def initialize(self, args):\n        raise pb_utils.TritonModelException('no disk')\n",
         "TritonModelException: no disk; at model.py(9): initialize"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded_there(tmp_path: Path, code: str, says: str) -> None:
    write(tmp_path, "m", code, ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await repository.load("m")
            assert says in str(failed.value)

    asyncio.run(run())


def test_an_environment_is_a_folder_beside_the_model(tmp_path: Path) -> None:
    tell = "    def execute(self, requests):\n        import os\n        return [said(os.environ['MARK'])]\n"
    write(tmp_path, "m", HEAD + tell + SAY, ANY % environment("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env"))
    (tmp_path / "m" / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "m" / "env" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nMARK=mine exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "m", text("x"))).tolist() == [b"mine"]

    asyncio.run(run())


def test_an_interpreter_needs_numpy_and_nothing_else(tmp_path: Path) -> None:
    """One that finds NumPy alone, which it takes from a folder of its own: no package of ours, and no ml_dtypes."""
    site = tmp_path / "site"
    site.mkdir()
    for package in ("numpy", "numpy.libs"):
        (site / package).symlink_to(Path(np.__file__).parents[1] / package)
    python = tmp_path / "python"
    (site / "start.py").write_text(
        f"import runpy, sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]\n"
        "sys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -I -S -u {site}/start.py "$@"\n')
    python.chmod(0o755)
    tell = "    def execute(self, requests):\n        import sys\n" + (
        "        names = {m.partition('.')[0] for m in sys.modules} & {'millrace', 'ml_dtypes', 'msgspec', 'numpy'}\n"
        "        return [said(' '.join(sorted(names))) for _ in requests]\n"
    )
    models = tmp_path / "models"
    write(models, "m", HEAD + tell + SAY, ANY % environment("EXECUTION_ENV_PATH", str(python)))
    write(
        models,
        "half",
        HEAD + tell + SAY,
        (ANY % environment("EXECUTION_ENV_PATH", str(python))).replace("STRING", "BF16"),
    )

    async def run() -> None:
        async with loaded(models) as repository:
            assert (await one(repository, "m", text("x"))).tolist() == [b"numpy"]
            with pytest.raises(StatusError, match="model 'half' has tensors of BF16: install ml_dtypes where it runs"):
                await repository.load("half")

    asyncio.run(run())


def test_a_client_that_loads_a_model_chooses_no_interpreter(tmp_path: Path) -> None:
    tell = "    def execute(self, requests):\n        return [said('fine')]\n"
    write(tmp_path, "m", HEAD + tell + SAY, ANY % environment("EXECUTION_ENV_PATH", sys.executable))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            config = config_json(repository.get("m").config)
            await repository.load("m", config=config)
            config["parameters"]["EXECUTION_ENV_PATH"]["string_value"] = "/bin/sh"
            with pytest.raises(StatusError, match="is another one than its"):
                await repository.load("m", config=config)
            model = repository.get("m")
            assert (await model.infer(asked(model, IN=text("x")))).outputs["OUT"].tolist() == [b"fine"]

    asyncio.run(run())
