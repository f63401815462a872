"""Files of PyTorch before PyTorch reads them: nothing in them is unpickled by Python, or is Python's code.

TorchScript (`torch.jit.save`) is a zip whose data PyTorch reads with an unpickler of its own, in C++, which makes
tensors and classes of the archive's code and calls nothing; its code is in a language without files, but for the two
operators that are refused here. A module saved with `torch.save` is a pickle, and is refused.

`torch.export.load` is another matter: it unpickles sample inputs, weights and constants where a file says so, takes
names of functions out of all of `torch` and has SymPy evaluate expressions. So a program is read here first, whatever
asks for one of these is refused by name, and PyTorch is given a copy of what was read, without the sample inputs.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.model_repository.backends.framework_backend import check_size, failing
from millrace.model_repository.request.status_code import Code, StatusError

_MOST_ENTRIES = 100_000
_MOST_TEXT_BYTES = 64 << 20  # of code, and of a program without its weights
# Of TorchScript: they write and read files of the server; and classes written in C++, but for quantised weights.
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
# Expressions of sizes: numbers, symbols, and SymPy's functions of these.
_WORDS = re.compile(r"[A-Za-z_][\w]*")
_EXPRESSION = re.compile(r"(Symbol\('[a-z]+\d+'|[\w\s(),+\-*/<>=&|~%]|\d\.\d)*")
_KNOWN_WORDS = re.compile(
    r"[a-z]{1,2}\d+|Symbol|positive|nonnegative|integer|True|False|Max|Min|Mod|FloorDiv|PythonMod|CleanDiv|CeilDiv"
    r"|CeilToInt|FloorToInt|TruncToInt|TruncToFloat|RoundToInt|ToFloat|IntTrueDiv|FloatTrueDiv|PowByNatural|FloatPow"
    r"|ModularIndexing|Identity|Where|Piecewise|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Integer|Abs|floor|ceiling|sqrt|oo|int_oo"
)
# What takes SymPy for ever: shifts, powers of powers, large ones, many.
_VAST = re.compile(r"<<|>>|\*\*\s*(?![0-9](?!\w|\s*\*\*))|(\*\*.*){5}")
_LONGEST_EXPRESSION = 1000


def script(file: Path) -> bool:
    """Whether it is TorchScript, whose code was looked at; False: a program of torch.export. raises StatusError"""
    with _opened(file) as archive:
        names = _names(file, archive)
        if "archive_format" in names:
            return False
        if not any(name.startswith("code/") for name in names):
            why = "is a pickle of torch.save, which would run whatever it holds"
            raise _refused(file, f"{why}; save it with torch.export.save or torch.jit.save")
        for name, entry in names.items():
            if name.startswith("code/") and name.endswith(".py"):
                found = _FILES.search(_text(file, archive, entry))
                if found:
                    what = f"calls {found[1]}, which is about files" if found[1] else f"has the class {found[2]}"
                    raise _refused(file, f"{what}: nothing of a network needs it")
    return True


def program(file: Path) -> io.BytesIO:
    """A copy of what torch.export.save wrote, for torch.export.load. raises StatusError"""
    with _opened(file) as archive, failing("PyTorch"):
        names = _names(file, archive)
        compiled = next((name for name in names if name.startswith("data/aotinductor/")), None)
        if compiled:
            raise _refused(
                file, "holds machine code of AOTInductor, which is not loaded here; write it with torch.export.save"
            )
        copy, root = io.BytesIO(), next(iter(names.values())).filename.split("/")[0]
        with zipfile.ZipFile(copy, "w") as written:
            for name, entry in names.items():
                data = archive.read(entry)
                if name.startswith("data/sample_inputs/"):
                    data = b""  # a pickle that nothing here needs
                elif name.endswith(".json"):
                    data = json.dumps(_checked(file, name, _text(file, archive, entry))).encode()
                elif name.startswith(("data/weights/", "data/constants/")) and name.endswith(".pt"):
                    raise _refused(file, f"has {name}, which is a pickle; write it anew with torch.export.save")
                written.writestr(f"{root}/{name}", data)
    copy.seek(0)
    return copy


def _checked(file: Path, name: str, text: str) -> Any:
    """JSON as it may be handed on."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(file, f"has {name}, which is no JSON: {error}") from None
    for key, value in _pairs(found):
        if key == "use_pickle" and value is not False:
            raise _refused(file, f"has {name}, by which a tensor is a pickle; export plain tensors")
        if key == "path_name" and str(value).startswith(("custom_obj_", "opaque_obj_")):
            raise _refused(file, f"has {name}, by which {value} is a pickled object; export plain tensors")
        is_name = isinstance(value, dict)  # of a tensor that is called so; as a target it would be none
        if key == "target" and not is_name and not _TARGET.fullmatch(str(value)):
            raise _refused(file, f"calls {value!r:.80}, which is no operator of a network")
        if key == "expr_str" and not _is_size(value):
            raise _refused(file, f"has a size that is no expression of numbers and symbols: {value!r:.80}")
    if isinstance(found, dict) and "graph_module" in found:
        found["guards_code"] = []  # Python's; sizes are compared without it
        for key, nodes in _pairs(found):
            for node in nodes if key == "nodes" and isinstance(nodes, list) else ():
                node["metadata"] = {}  # where each came from: names of classes and functions
    return found


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object, with its value; not recursive, for how deep it is a file may say."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from one.items()
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _is_size(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > _LONGEST_EXPRESSION or _VAST.search(text):
        return False
    is_plain = _EXPRESSION.fullmatch(text) is not None
    return is_plain and all(_KNOWN_WORDS.fullmatch(word) for word in _WORDS.findall(text))


def _opened(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise _refused(file, f"is no archive, as torch.jit.save and torch.export.save write it: {error}") from None


def _names(file: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Entries by their names without the archive's own. raises StatusError, also where they do not fit into memory"""
    entries = archive.infolist()
    names = {entry.filename.partition("/")[2]: entry for entry in entries}
    roots = {entry.filename.partition("/")[0] for entry in entries}
    if len(names) < len(entries) or len(roots) != 1 or len(entries) > _MOST_ENTRIES:
        raise _refused(file, f"has {len(entries)} entries, of which some have one name, or several roots")
    check_size(file, file.stat().st_size + sum(entry.file_size for entry in entries))
    return names


def _text(file: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> str:
    if entry.file_size > _MOST_TEXT_BYTES:
        raise _refused(file, f"has {entry.filename} of {entry.file_size} bytes, at most {_MOST_TEXT_BYTES} are read")
    with failing("PyTorch"):
        return archive.read(entry).decode()


def _refused(file: Path, why: str) -> StatusError:
    return StatusError(Code.INVALID_ARG, f"failed to load {file.parent.name}/{file.name}: it {why}")
