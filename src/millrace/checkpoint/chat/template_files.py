"""Chat templates of a checkpoint, read from wherever they are stored.

Like in transformers: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, or `chat_template` of
tokenizer_config.json, which is a string or a list of {name, template}.
"""

import json
from pathlib import Path

from millrace.checkpoint.chat.chat_template import DEFAULT, TOOL_USE
from millrace.checkpoint.tokenizer.tokenizer import TEMPLATE_FILE, TOKENIZER_CONFIG, Files, json_object, read_files
from millrace.errors import CheckpointError

TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TEMPLATES = 64
_SUFFIX = ".jinja"


def additional_templates(folder: Path) -> dict[str, bytes]:
    """Return the contents of additional_chat_templates/*.jinja by path relative to `folder`. raises CheckpointError"""
    within = folder / TEMPLATE_FOLDER
    try:
        names = sorted(path.name for path in within.iterdir() if path.suffix == _SUFFIX) if within.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{within} cannot be read: {error.strerror}", "a folder", "check the folder") from error
    if len(names) > MAX_TEMPLATES:
        raise CheckpointError(f"{within} has {len(names)} templates", f"at most {MAX_TEMPLATES}", "remove some")
    return read_files(folder, [f"{TEMPLATE_FOLDER}/{name}" for name in names])


def read_templates(files: Files, folder: Path) -> dict[str, str]:
    """Return the templates by name, one of them "default"; {} if there are none. raises CheckpointError"""
    result = {
        DEFAULT if name == TEMPLATE_FILE else Path(name).name.removesuffix(_SUFFIX): _decoded(folder / name, data)
        for name, data in files.items()
        if name == TEMPLATE_FILE or name.startswith(f"{TEMPLATE_FOLDER}/")
    }
    if DEFAULT not in result:
        result = {**_of_config(files, folder), **result}
    if result and DEFAULT not in result:
        if TOOL_USE not in result:
            raise CheckpointError(
                f"{folder} has the chat templates {', '.join(sorted(result))}", 'a template named "default"',
                "name one of them default",
            )  # fmt: skip
        result[DEFAULT] = result[TOOL_USE]
    return result


def flatten(files: Files, folder: Path) -> dict[str, bytes]:
    """Return the files without subfolders: additional templates become a list in tokenizer_config.json."""
    flat = {name: data for name, data in files.items() if not name.startswith(f"{TEMPLATE_FOLDER}/")}
    if len(flat) == len(files):
        return flat
    templates = read_templates(files, folder)
    flat.pop(TEMPLATE_FILE, None)
    config = json_object(flat, TOKENIZER_CONFIG, folder)
    config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return flat | {TOKENIZER_CONFIG: json.dumps(config).encode()}


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}", "a text file", "copy the file again") from error


def _of_config(files: Files, folder: Path) -> dict[str, str]:
    value = json_object(files, TOKENIZER_CONFIG, folder).get("chat_template")
    if value is None or isinstance(value, str):
        return {} if value is None else {DEFAULT: value}
    entries = value if isinstance(value, list) else [value]
    result: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                result[name] = template
            case _:
                raise CheckpointError(
                    f"{folder / TOKENIZER_CONFIG}: chat_template is {str(value)[:200]}",
                    "a string, or a list of {name, template}", "correct chat_template",
                )  # fmt: skip
    if len(result) > MAX_TEMPLATES:
        raise CheckpointError(
            f"{folder / TOKENIZER_CONFIG}: chat_template has {len(result)} templates", f"at most {MAX_TEMPLATES}",
            "remove some",
        )  # fmt: skip
    return result
