"""Runs `millrace pull`, whose options are in `options.py`: `--help` imports nothing else."""

from millrace.cli.console import note, print_json, progress, size
from millrace.compile.resolve_model import model_folder
from millrace.env import Env


def run(env: Env, model: str, as_json: bool) -> None:
    """Run `millrace pull`."""
    with progress(as_json) as report:
        name, folder = model_folder(model, env, report)
    files = folder.iterdir() if folder.is_dir() else [folder]  # a GGUF file is one that is here already
    nbytes = sum(f.stat().st_size for f in files if f.is_file())
    if as_json:
        print_json({"name": name, "folder": str(folder), "bytes": nbytes})
    else:
        note(f"{model}: {size(nbytes)} in {folder}")
