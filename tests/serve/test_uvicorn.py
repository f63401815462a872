"""The server derives from a class that uvicorn does not document, in one file and within tested versions."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_installed_version_is_one_of_those_that_the_package_allows() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (allowed,) = (found for one in dependencies if (found := re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", one)))
    minor = int(version("uvicorn").split(".")[1])
    assert int(allowed[1]) <= minor < int(allowed[2])


def test_one_file_uses_its_private_classes() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"^from uvicorn[._]|^import uvicorn[._]", path.read_text(), re.MULTILINE)
    }
    assert users == {"src/millrace/serve/http/connection.py"}
