"""Prints files, lines and functions of each room of the package, and the largest folder of each.

python -m tools.rooms [CHECKOUT]
"""

import ast
import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "src" / "millrace"
    rooms: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        rooms.setdefault(path.relative_to(root).parts[0].removesuffix(".py"), []).append(path)
    print(f"{'room':<18}{'files':>6}{'lines':>8}{'functions':>11}  most files in one folder")
    totals: Counter[str] = Counter()
    for room, paths in rooms.items():
        texts = [path.read_text() for path in paths]
        lines = sum(text.count("\n") for text in texts)
        nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
        functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
        folder, most = Counter(path.parent for path in paths).most_common(1)[0]
        where = "" if folder == root else f"  {most} in {folder.relative_to(root)}"
        print(f"{room:<18}{len(paths):>6}{lines:>8}{functions:>11}{where}")
        totals.update(files=len(paths), lines=lines, functions=functions)
    print(f"{'all':<18}{totals['files']:>6}{totals['lines']:>8}{totals['functions']:>11}")


if __name__ == "__main__":
    main()
