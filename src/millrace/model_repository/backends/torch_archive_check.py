"""Security check of PyTorch files before PyTorch reads them: no pickles for Python, and no Python code.

TorchScript (`torch.jit.save`) is a zip file. PyTorch reads its data with its own C++ unpickler, which creates tensors
and classes of the archive's code and calls nothing. Its language has no file access except two operators, which are
refused here. A module saved with `torch.save` is a pickle, and is refused.

`torch.export.load`, however, unpickles sample inputs, weights and constants if a file says so, resolves function names
in all of `torch`, and evaluates expressions with SymPy. A program is therefore parsed here first, files that use any of
this are refused, and PyTorch gets a copy of the checked content without the sample inputs.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.model_repository.backends.framework_backend import check_size, framework_errors
from millrace.model_repository.request.status_code import Code, StatusError

_MAX_ENTRIES = 100_000
_MAX_TEXT_BYTES = 64 << 20  # of code, and of a program without its weights
# In TorchScript: operators that access files, and C++ classes other than quantised weights.
_FILES = re.compile(r"\.\s*(save|from_file)\s*\(|\btorch\.classes\.(?!quantized\.)(\w+)")
_OPERATORS = (
    "add|sub|mul|truediv|floordiv|mod|neg|pos|abs|pow|eq|ne|lt|le|gt|ge|and_|or_|xor|not_|lshift|rshift|getitem"
)
_TARGET = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed)\.(?!__|(from_file|save)\b)\w+\.(?!__)\w+"
    r"|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.(?!__)\w+"
    r"|torch\.ops\.higher_order\.(cond|while_loop|map_impl|scan|associative_scan|wrap_with_set_grad_enabled"
    r"|wrap_with_autocast)"
    rf"|torch\._?sym_\w+|_operator\.({_OPERATORS})|math\.(?!__)\w+"
)
# Size expressions: numbers, symbols and SymPy functions of these.
_WORDS = re.compile(r"[A-Za-z_][\w]*")
_EXPRESSION = re.compile(r"(Symbol\('[a-z]+\d+'|[\w\s(),+\-*/<>=&|~%]|\d\.\d)*")
_KNOWN_WORDS = re.compile(
    r"[a-z]{1,2}\d+|Symbol|positive|nonnegative|integer|True|False|Max|Min|Mod|FloorDiv|PythonMod|CleanDiv|CeilDiv"
    r"|CeilToInt|FloorToInt|TruncToInt|TruncToFloat|RoundToInt|ToFloat|IntTrueDiv|FloatTrueDiv|PowByNatural|FloatPow"
    r"|ModularIndexing|Identity|Where|Piecewise|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Integer|Abs|floor|ceiling|sqrt|oo|int_oo"
)
# Expressions that could take SymPy forever: shifts, nested, large or many powers.
_VAST = re.compile(r"<<|>>|\*\*\s*(?![0-9](?!\w|\s*\*\*))|(\*\*.*){5}")
_MAX_EXPRESSION_LENGTH = 1000


def check_script(file: Path) -> bool:
    """Return True for checked TorchScript, False for a torch.export program. raises StatusError"""
    with _open_archive(file) as archive:
        names = _names(file, archive)
        if "archive_format" in names:
            return False
        if not any(name.startswith("code/") for name in names):
            reason = "is a pickle of torch.save, which would run whatever it holds"
            raise _refusal(file, f"{reason}; save it with torch.export.save or torch.jit.save")
        for name, entry in names.items():
            if name.startswith("code/") and name.endswith(".py"):
                match = _FILES.search(_text(file, archive, entry))
                if match:
                    message = f"calls {match[1]}, which is about files" if match[1] else f"has the class {match[2]}"
                    raise _refusal(file, f"{message}: nothing of a network needs it")
    return True


def copy_program(file: Path) -> io.BytesIO:
    """Return a checked copy of a torch.export program, for torch.export.load. raises StatusError"""
    with _open_archive(file) as archive, framework_errors("PyTorch"):
        names = _names(file, archive)
        compiled = next((name for name in names if name.startswith("data/aotinductor/")), None)
        if compiled:
            raise _refusal(
                file, "holds machine code of AOTInductor, which is not loaded here; write it with torch.export.save"
            )
        copy, root = io.BytesIO(), next(iter(names.values())).filename.split("/")[0]
        with zipfile.ZipFile(copy, "w") as writer:
            for name, entry in names.items():
                data = archive.read(entry)
                if name.startswith("data/sample_inputs/"):
                    data = b""  # a pickle that is not needed
                elif name.endswith(".json"):
                    data = json.dumps(_check_json(file, name, _text(file, archive, entry))).encode()
                elif name.startswith(("data/weights/", "data/constants/")) and name.endswith(".pt"):
                    raise _refusal(file, f"has {name}, which is a pickle; write it anew with torch.export.save")
                writer.writestr(f"{root}/{name}", data)
    copy.seek(0)
    return copy


def _check_json(file: Path, name: str, text: str) -> Any:
    """Parse and check JSON of a program; return a version safe for PyTorch."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(file, f"has {name}, which is no JSON: {error}") from None
    for key, value in _pairs(document):
        if key == "use_pickle" and value is not False:
            raise _refusal(file, f"has {name}, by which a tensor is a pickle; export plain tensors")
        if key == "path_name" and str(value).startswith(("custom_obj_", "opaque_obj_")):
            raise _refusal(file, f"has {name}, by which {value} is a pickled object; export plain tensors")
        is_name = isinstance(value, dict)  # a tensor named "target", not a call target
        if key == "target" and not is_name and not _TARGET.fullmatch(str(value)):
            raise _refusal(file, f"calls {value!r:.80}, which is no operator of a network")
        if key == "expr_str" and not _is_size(value):
            raise _refusal(file, f"has a size that is no expression of numbers and symbols: {value!r:.80}")
    if isinstance(document, dict) and "graph_module" in document:
        document["guards_code"] = []  # Python code; sizes are checked without it
        for key, nodes in _pairs(document):
            for node in nodes if key == "nodes" and isinstance(nodes, list) else ():
                node["metadata"] = {}  # names of classes and functions for debugging
    return document


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of all nested objects; not recursive, because the file controls the depth."""
    left = [value]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield from node.items()
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)


def _is_size(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > _MAX_EXPRESSION_LENGTH or _VAST.search(text):
        return False
    is_plain = _EXPRESSION.fullmatch(text) is not None
    return is_plain and all(_KNOWN_WORDS.fullmatch(word) for word in _WORDS.findall(text))


def _open_archive(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise _refusal(file, f"is no archive, as torch.jit.save and torch.export.save write it: {error}") from None


def _names(file: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return entries by name below the archive's root. raises StatusError, also if they exceed memory"""
    entries = archive.infolist()
    names = {entry.filename.partition("/")[2]: entry for entry in entries}
    roots = {entry.filename.partition("/")[0] for entry in entries}
    if len(names) < len(entries) or len(roots) != 1 or len(entries) > _MAX_ENTRIES:
        raise _refusal(file, f"has {len(entries)} entries, of which some have one name, or several roots")
    check_size(file, file.stat().st_size + sum(entry.file_size for entry in entries))
    return names


def _text(file: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> str:
    if entry.file_size > _MAX_TEXT_BYTES:
        raise _refusal(file, f"has {entry.filename} of {entry.file_size} bytes, at most {_MAX_TEXT_BYTES} are read")
    with framework_errors("PyTorch"):
        return archive.read(entry).decode()


def _refusal(file: Path, reason: str) -> StatusError:
    return StatusError(Code.INVALID_ARG, f"failed to load {file.parent.name}/{file.name}: it {reason}")
