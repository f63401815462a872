"""Files of PyTorch that are looked at before it reads them: pickles, code, archives that are damaged or too large."""

import asyncio
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.model_repository.backends import pytorch, torch_archive_check
from millrace.model_repository.request.status_code import StatusError
from tests.support.loaded import Loaded, infer, refused
from tests.support.torch_models import CONFIG, Dense, exact, exported_dense, scripted, write


def changed(path: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """The archive with one entry changed, or added."""
    with zipfile.ZipFile(path) as archive:
        held = {n: archive.read(n) for n in archive.namelist()}
    root = next(iter(held)).split("/")[0]
    held[f"{root}/{name}"] = change(held.get(f"{root}/{name}", b""))
    with zipfile.ZipFile(path, "w") as archive:
        for n, data in held.items():
            archive.writestr(n, data)
    return path


class Touch:
    """Pickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps(Touch(made))
    pickle.loads(pickled)
    assert made.exists(), "the pickle would show that it ran"
    made.unlink()
    repository = tmp_path / "repository"
    write(repository, "module", lambda path: torch.save({"m": Touch(made)}, path))
    write(repository, "raw", lambda path: path.write_bytes(pickled))
    write(repository, "script", scripted(Dense()))
    changed(repository / "script" / "1" / "model.pt", "data.pkl", lambda _: pickled)
    for name, config, key in (("weights", "data/weights/model_weights_config.json", "layer.weight"),
                              ("object", "data/constants/model_constants_config.json", "")):  # fmt: skip
        write(repository, name, exported_dense, CONFIG)
        said = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": not key, "tensor_meta": None}

        def asks(data: bytes, key: str = key, said: dict[str, Any] = said) -> bytes:
            found = json.loads(data)
            if key:
                found["config"][key]["use_pickle"] = True
            else:
                found["config"]["c"] = said | {"use_pickle": False}
            return json.dumps(found).encode()

        changed(repository / name / "1" / "model.pt", config, asks)
        changed(repository / name / "1" / "model.pt", "data/constants/opaque_obj_0", lambda _: pickled)
        changed(repository / name / "1" / "model.pt", "data/weights/weight_0", lambda _: pickled)
    write(repository, "legacy", exported_dense, CONFIG)
    changed(repository / "legacy" / "1" / "model.pt", "data/weights/model.pt", lambda _: pickled)
    failed = {re.findall("load failed for model '(\\w+)'", one)[0]: one for one in refused(repository)}
    assert not made.exists()
    assert "is a pickle of torch.save, which would run whatever it holds" in failed.pop("module")
    assert "is no archive, as torch.jit.save and torch.export.save write it" in failed.pop("raw")
    assert "PyTorch error" in failed.pop("script")  # its own unpickler knows no such class
    assert "by which a tensor is a pickle" in failed.pop("weights")
    assert "by which opaque_obj_0 is a pickled object" in failed.pop("object")
    assert "has data/weights/model.pt, which is a pickle" in failed.pop("legacy")
    assert not failed


def test_sample_inputs_are_left_out(tmp_path: Path) -> None:
    """A pickle that every program has, and that torch.export.load reads, by its other unpickler if need be."""
    made = tmp_path / "made"
    write(tmp_path / "r", "dense", exported_dense)
    file = changed(tmp_path / "r/dense/1/model.pt", "data/sample_inputs/model.pt", lambda _: pickle.dumps(Touch(made)))

    async def run() -> None:
        async with Loaded(tmp_path / "r") as repository:
            x = np.ones((1, 16), np.float32)
            np.testing.assert_allclose((await infer(repository, "dense", INPUT__0=x))["OUTPUT__0"], exact(x), rtol=1e-5)

    asyncio.run(run())
    assert not made.exists()
    with pytest.raises((RuntimeError, AssertionError)), file.open("rb") as opened:  # of what it made
        torch.export.load(opened)
    assert made.exists(), "torch.export.load alone would run it"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("torch.ops.aten.relu.default", "torch.os.system", "calls 'torch.os.system', which is no operator"),
        ("torch.ops.aten.relu.default", "torch.ops.aten.from_file.default", "calls 'torch.ops.aten.from_file.default'"),
        ("torch.ops.aten.relu.default", "torch.ops.load_library.__call__", "which is no operator of a network"),
        ("torch.ops.aten.relu.default", "_operator.methodcaller", "which is no operator of a network"),
        ("Symbol('s", "eval('s", "has a size that is no expression of numbers and symbols"),
        ("positive=True", "positive=open", "has a size that is no expression"),
        ("Symbol('s", "9**9**9**9+Symbol('s", "has a size that is no expression"),
        ("Symbol('s", "((((9**9)**9)**9)**9)**9+Symbol('s", "has a size that is no expression"),
        ("Symbol('s", "(1<<999999999999)+Symbol('s", "has a size that is no expression"),
        ("Symbol('s", "2**99999999999+Symbol('s", "has a size that is no expression"),
        ("Symbol('s", "Symbol.mro()+Symbol('s", "has a size that is no expression"),
        ('"expr_str": "Symbol', '"expr_str": {"a": "open(1)"}, "b": "Symbol', "has a size that is no expression"),
        ("torch.ops.aten.relu.default", "torch.ops.aten.relu.__class__", "which is no operator of a network"),
    ],
)  # fmt: skip
def test_programs_that_ask_for_more_than_arithmetic(tmp_path: Path, old: str, new: str, what: str) -> None:
    write(tmp_path, "dense", exported_dense)

    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), 1)

    changed(tmp_path / "dense" / "1" / "model.pt", "models/model.json", change)
    (failed,) = refused(tmp_path)
    assert what in failed, failed


def test_scripts_that_touch_files(tmp_path: Path) -> None:
    class Writes(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.save(x, "/tmp/never")
            return x

    write(tmp_path, "writes", scripted(Writes()))
    (failed,) = refused(tmp_path)
    assert "it calls save, which is about files: nothing of a network needs it" in failed


def test_damaged_archives(tmp_path: Path) -> None:
    """Cut off anywhere, each byte of its directory changed: an error, or the same network."""
    file = tmp_path / "model.pt"
    for save in (scripted(Dense()), exported_dense):
        save(file)
        data, cut = file.read_bytes(), tmp_path / "cut.pt"
        rng = np.random.default_rng(0)
        for n in (0, 1, 40, len(data) // 2, len(data) - 1):
            cut.write_bytes(data[:n])
            with pytest.raises(StatusError, match=r"is no archive|PyTorch error"):
                pytorch._load(cut)
        for at in rng.integers(len(data) - 1500, len(data), 12):
            cut.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            try:
                found = pytorch._load(cut)
            except StatusError:
                continue
            assert np.allclose(found.run({0: torch.ones(1, 16)})[0].detach(), exact(np.ones((1, 16))))


def test_archives_that_are_too_large_or_say_things_twice(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    with zipfile.ZipFile(file, "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("m/code/a.py", "")
        archive.writestr("m/code/a.py", "")
    with pytest.raises(StatusError, match="2 entries, of which some have one name"):
        torch_archive_check.check_script(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/code/a.py", b"\n" * ((64 << 20) + 1))
    with pytest.raises(StatusError, match=r"has m/code/a.py of \d+ bytes, at most 67108864 are read"):
        torch_archive_check.check_script(file)
    file.write_bytes(b"")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/data/aotinductor/model/a.so", b"\x7fELF")
    with pytest.raises(StatusError, match="holds machine code of AOTInductor"):
        torch_archive_check.copy_program(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/models/model.json", "[" * 100_000)
    with pytest.raises(StatusError, match=r"has models/model.json, which is no JSON"):
        torch_archive_check.copy_program(file)
    assert not torch_archive_check.check_script(file)
