"""Changes of several models beside one another: one that hangs, folders that are away, links, names with a dot."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.python_backend.stub import importing
from millrace.model_repository.repository.file_mtimes import stamp
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError
from tests.support.loaded import BATCHES, Loaded, asked, becomes
from tests.support.python_models import ANY, HEAD, SAY, loaded, one, text, write
from tests.support.repository import write_models

HANGS = "import time\nfrom pathlib import Path\nwhile not Path({!r}).exists():\n    time.sleep(0.005)\n"
SAYS_NAME = HEAD + "    def execute(self, requests):\n        return [said(utils.NAME)]\n" + SAY
UTILS = "import utils\n" + SAYS_NAME


def test_a_model_whose_import_hangs_keeps_no_other_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importing, "IMPORT_LOCK_TIMEOUT_S", 0.3)
    mark, root = tmp_path / "mark", tmp_path / "models"
    write(root, "hangs", "import utils\n" + HANGS.format(str(mark)) + SAYS_NAME, ANY % "", utils="NAME = 'hangs'")
    write(root, "other", UTILS, ANY % "", utils="NAME = 'other'")
    write_models(root, {"m": BATCHES % ""})

    async def run() -> None:
        async with loaded(root) as repository:
            hanging = asyncio.ensure_future(repository.load("hangs"))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                await repository.load("m")
                assert (await repository.get("m").infer(asked(repository.get("m"), 3))).outputs["OUTPUT0"].item() == 3
                await repository.unload("m")
                assert (await one(repository, "other", text("x"))).tolist() == [b"other"], "and its own utils"
                assert not hanging.done()
                mark.touch()
                await hanging
                assert (await one(repository, "hangs", text("x"))).tolist() == [b"hangs"]

    asyncio.run(run())
    assert "model.py of hangs is still being imported after 0.3 s" in caplog.text


def test_the_index_says_what_is_being_loaded_and_a_reload_takes_nothing_away(tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", tmp_path / "models"
    write(root, "m", HANGS.format(str(mark)) + UTILS, ANY % "", utils="NAME = 'm'")
    loading = {"name": "m", "version": "1", "state": "LOADING"}
    ready = {"name": "m", "version": "1", "state": "READY"}

    async def run() -> None:
        async with loaded(root) as repository:
            first = asyncio.ensure_future(repository.load("m"))
            async with asyncio.timeout(10):
                while await repository.index(only_ready=False) != [loading]:
                    await asyncio.sleep(0.01)
            assert await repository.index(only_ready=True) == [] and not repository.is_ready()
            with pytest.raises(StatusError, match="'m' version 1 is not at ready state"):
                repository.get("m", 1)
            mark.touch()
            await first
            assert await repository.index(only_ready=False) == [ready] and repository.is_ready()
            mark.unlink()
            (root / "m" / "1" / "changed").touch()
            again = asyncio.ensure_future(repository.load("m"))
            await becomes(lambda: bool(repository._changes.locks))
            assert await repository.index(only_ready=False) == [ready], "the old one serves"
            mark.touch()
            await again
            write(root, "bad", "raise ValueError('no')\n", ANY % "", utils="")
            with pytest.raises(StatusError):
                await repository.load("bad")
            states = {each["name"]: each["state"] for each in await repository.index(only_ready=False)}
            assert states == {"m": "READY", "bad": "UNAVAILABLE"}

    asyncio.run(run())


def test_changes_of_one_model_wait_for_one_another_and_only_so_many(tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", tmp_path / "models"
    write(root, "m", HANGS.format(str(mark)) + UTILS, ANY % "", utils="NAME = 'm'")

    async def run() -> None:
        async with loaded(root) as repository:
            changing = [asyncio.ensure_future(repository.load("m")) for _ in range(16)]
            await becomes(lambda: sum(turn.n for turn in repository._changes.locks._locks.values()) == 16)
            with pytest.raises(StatusError) as refused:
                await repository.unload("m")
            assert refused.value.code is Code.UNAVAILABLE
            assert str(refused.value) == "16 changes of model 'm' wait for one that is under way"
            mark.touch()
            await asyncio.gather(*changing)
            await repository.unload("m")
            assert not repository._changes.locks, "nothing is kept of a change that is made"

    asyncio.run(run())


def test_a_repository_that_is_away_for_a_moment_is_looked_at_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, away = tmp_path / "models", tmp_path / "away"
    write_models(root, {"m": BATCHES % ""})
    caplog.set_level(logging.WARNING)

    def n_reported() -> int:
        return sum("cannot look at the model repository" in r.getMessage() for r in caplog.records)

    async def run() -> None:
        flags = RepositoryFlags(model_repository=(str(root),), model_control_mode="poll", repository_poll_secs=0.1)
        repository = ModelRepository(flags)
        assert await repository.start() == []
        root.rename(away)
        await becomes(lambda: n_reported() > 0)
        await asyncio.sleep(0.25)
        assert n_reported() == 1, "once, however often it looks"
        assert repository.get("m").version == 1, "what is served stays"
        write_models(away, {"second": BATCHES % ""})
        away.rename(root)
        await becomes(lambda: [m.name for m in repository.models()] == ["m", "second"])
        await repository.close(5.0)

    asyncio.run(run())


def test_a_model_that_hangs_at_the_start_keeps_no_folder_from_being_followed(tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", tmp_path / "models"
    write(root, "hangs", HANGS.format(str(mark)) + UTILS, ANY % "", utils="NAME = 'hangs'")

    async def run() -> None:
        flags = RepositoryFlags(model_repository=(str(root),), model_control_mode="poll", repository_poll_secs=0.1)
        repository = ModelRepository(flags)
        starting = asyncio.ensure_future(repository.start())
        await asyncio.sleep(0.05)
        write_models(root, {"m": BATCHES % ""})
        await becomes(lambda: [m.name for m in repository.models()] == ["m"])
        assert not starting.done()
        mark.touch()
        assert await starting == [] and repository.get("hangs").version == 1
        await repository.close(5.0)

    asyncio.run(run())


def test_only_files_of_the_repository_make_a_model_another(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    write_models(root, {"m": BATCHES % "", "common": BATCHES % ""})
    outside.mkdir()
    (outside / "file").write_text("a")
    (root / "common" / "shared").write_text("a")
    for name, to in {
        "out": outside, "file": outside / "file", "in": root / "common" / "shared", "up": root, "gone": root / "gone",
    }.items():  # fmt: skip
        (root / "m" / "1" / name).symlink_to(to)
    before = stamp([root], "m")
    assert before == stamp([root], "m")
    (outside / "file").write_text("something else")
    (outside / "more").write_text("")
    cache = root / "m" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.pyc").write_text("")
    assert stamp([root], "m") == before
    (root / "common" / "shared").write_text("something else")
    changed = stamp([root], "m")
    assert changed != before, "a link inside it is followed"
    os.utime(root / "m" / "config.pbtxt", (1, 1))
    assert stamp([root], "m") != changed


def test_a_name_with_a_dot_in_front_is_none(tmp_path: Path) -> None:
    write_models(tmp_path, {".hidden": BATCHES % "", "m": BATCHES % ""})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            assert [m.name for m in repository.models()] == ["m"]
            with pytest.raises(StatusError, match=r"failed to load '\.hidden', failed to poll from model repository"):
                await repository._changes.load(ModelId("", ".hidden"))

    asyncio.run(run())
