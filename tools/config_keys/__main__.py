"""Write `src/millrace/checkpoint/config/declared_keys.py`: the keys that transformers' classes and llama.cpp declare.

`python -m tools.config_keys` needs the `dev` extra. Run it after a new family is added, or transformers is updated.
"""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from millrace.checkpoint.config.families.all_families import FAMILIES

OUTPUT = Path(__file__).parents[2] / "src/millrace/checkpoint/config/declared_keys.py"
HEAD = '''"""Keys that transformers' configuration class of each family declares, and GGUF's keys that llama.cpp knows.

Written by `python -m tools.config_keys` from transformers {version} and gguf {gguf}; do not edit.
"""

from collections.abc import Mapping

# By model type. A default that is no JSON value (it is computed) is None.
DECLARED: Mapping[str, Mapping[str, object]] = {{
'''
GGUF_HEAD = """# Metadata keys of a model, without the architecture's prefix.
GGUF_KEYS = frozenset("""


def declared(model_type: str) -> dict[str, object]:
    """Return the keys of the configuration class of `model_type`, with their JSON defaults."""
    from transformers import CONFIG_MAPPING

    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    return {field.name: _json_value(field.default) for field in sorted(fields, key=lambda f: f.name)}


def gguf_keys() -> list[str]:
    """Return the metadata keys of a model that llama.cpp's own package names, without the architecture's prefix."""
    from gguf.constants import Keys

    names: list[str] = []
    groups: list[type] = [Keys]
    while groups:
        for value in vars(groups.pop()).values():
            if isinstance(value, type):
                groups.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                names.append(value.removeprefix("{arch}."))
    return sorted(set(names))


def _json_value(default: object) -> object:
    return default if isinstance(default, str | int | float | bool) else None


def source() -> str:
    """Return the text of the generated module, unformatted."""
    import transformers

    tables = {name: declared(name) for name in FAMILIES}
    lines = [
        f"    {json.dumps(name)}: {{\n"
        + "".join(f"        {json.dumps(key)}: {value!r},\n" for key, value in keys.items())
        + "    },\n"
        for name, keys in tables.items()
    ]
    listed = "".join(f"        {json.dumps(name)},\n" for name in gguf_keys())
    head = HEAD.format(version=transformers.__version__, gguf=importlib.metadata.version("gguf"))
    return f"{head}{''.join(lines)}}}\n\n{GGUF_HEAD}\n    [\n{listed}    ]\n)\n"


def main() -> None:
    """Write the module and format it."""
    OUTPUT.write_text(source())
    subprocess.run([sys.executable, "-m", "ruff", "format", str(OUTPUT)], check=True)


if __name__ == "__main__":
    main()
