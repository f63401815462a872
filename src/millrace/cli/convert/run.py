"""Runs `millrace convert`, whose options are in `options.py`: `--help` imports nothing else."""

from pathlib import Path

from millrace.checkpoint.gguf.reader import is_gguf
from millrace.cli.console import heading, note, pairs, print_json, progress, size
from millrace.cli.signals import raise_on_sigterm
from millrace.compile.resolve_model import model_folder
from millrace.compress.checkpoint.safetensors_conversion import convert_to_safetensors
from millrace.engine.artifact.manifest import MANIFEST
from millrace.env import Env
from millrace.errors import ConfigError


def run(env: Env, model: str, output: Path, format_: str, as_json: bool) -> None:
    """Run `millrace convert`. raises ConfigError, CheckpointError, HubError, MachineError"""
    with raise_on_sigterm(), progress(as_json) as report:
        _, folder = model_folder(model, env, report, torch_weights=True)
        if is_gguf(folder) or (folder / MANIFEST).is_file():
            what = "an engine" if folder.is_dir() else "a GGUF file"
            raise ConfigError(
                f"{folder} is {what}", "a folder with weights of PyTorch (.bin, .pt, .pth)", "use it as it is"
            )
        result = convert_to_safetensors(folder, output, report)
    if as_json:
        print_json({
            "folder": str(output), "format": format_, "source": str(folder), "tensors": result.tensors,
            "bytes": result.nbytes, "weights": result.weights, "copied": result.copied,
            "not_tensors": result.extras, "not_copied": result.left_out,
        })  # fmt: skip
        return
    heading(str(output))
    pairs([
        ("tensors", f"{result.tensors}, {size(result.nbytes)}"),
        ("weights", result.weights[0] if len(result.weights) == 1 else f"{len(result.weights)} safetensors files"),
        ("copied", f"{len(result.copied)} other files: {', '.join(result.copied[:6])}"
                   f"{', ...' if len(result.copied) > 6 else ''}"),
    ])  # fmt: skip
    for text in result.notes:
        note(text)
