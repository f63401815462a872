"""Entry point of a stub process: `python __main__.py FD`, with the socket to the server.

This file must parse on any Python version; the modules that it loads require 3.10 and NumPy.
"""

import importlib.util
import sys
from pathlib import Path

NAME = "millrace_stub"


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036  the model's, and not ours
        sys.exit("Python " + sys.version.split()[0] + " runs no model: 3.10 or a later one is expected")
    folder = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p).resolve() != folder]  # hide the stub's files from the model
    spec = importlib.util.spec_from_file_location(
        NAME, str(folder / "__init__.py"), submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, folder
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    from millrace_stub.stub_process import run  # type: ignore[import-not-found]

    run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
