"""Writes docs/tutorial.ipynb from docs/tutorial.md.

python -m tools.tutorial                        after the page was edited
python -m tools.tutorial --run --mmlu FOLDER    runs the page on `tiny` first, and shows its outputs and pictures there
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tools.tutorial import NOTEBOOK, PAGE, filled, notebook, run, steps


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.tutorial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run the page, and show what its commands say")
    parser.add_argument("--mmlu", type=Path, help="MMLU's folder")
    asked = parser.parse_args()
    if asked.run:
        if asked.mmlu is None:
            parser.error("--run needs --mmlu")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
            outputs = run(steps(PAGE.read_text()), {"MMLU": str(asked.mmlu.resolve())}, folder, environment)
            for picture in (PAGE.parent / "tutorial").glob("*.png"):
                made = next(
                    folder / place for place in (picture.name, f"load/{picture.name}") if (folder / place).exists()
                )
                shutil.copyfile(made, picture)
        PAGE.write_text(filled(PAGE.read_text(), outputs))
    NOTEBOOK.write_text(notebook(PAGE.read_text()))


if __name__ == "__main__":
    main()
