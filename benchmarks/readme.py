"""The README's table and picture, from the newest run of a real model beside others: `python -m benchmarks.readme`."""

from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.page import SHOWN, kl, megabytes, table
from benchmarks.runs import REAL, Result, Speed, file_of, host, kl_from, left_out, of_kind, remarks, speeds

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speed.svg"
BEGIN, END = "<!-- benchmarks: written by python -m benchmarks.readme -->", "<!-- end of benchmarks -->"
_COLOURS = {"millrace": "#0b7285"}
_OTHER = "#adb5bd"


def newest() -> Result:
    """The last run of the real model beside others."""
    return [result for _, result in of_kind("peers") if result["shape"] == REAL][-1]


def by_engine(result: Result) -> dict[str, dict[str, Speed]]:
    found: dict[str, dict[str, Speed]] = {}
    for speed in speeds(result):
        found.setdefault(speed.engine, {})[speed.workload] = speed
    return found


def speed_table(result: Result) -> str:
    rows = []
    for engine, cells in by_engine(result).items():
        numbers, size = next(iter(cells.values())).numbers, megabytes(cells.values())
        rates = [f"{cells[w].median:,.0f}" if w in cells else "" for w in SHOWN]
        head = "; ".join(filter(None, (numbers.head, numbers.attention)))
        rows.append([engine, numbers.weights, size, numbers.activations, head, kl(engine, numbers), *rates])
    header = ("", "weights", "MB", "activations", "head", "KL", *(f"{name}, tok/s" for name in SHOWN.values()))
    versions = ", ".join(sorted({f"{name.split('-')[0]} {e['version']}" for name, e in result["engines"].items()}))
    told = f"SmolLM2-135M-Instruct, its Q4_1 file; {host(result)}; {result['date']}; {versions}."
    builds = [f"{remark}." for remark in remarks(result)] + [f"Left out: {line}." for line in left_out(result)]
    found = [speed for cells in by_engine(result).values() for speed in cells.values()]
    files = f"Speeds from {file_of(result)}. {kl_from(found)}".rstrip()
    files += f" `docs/{PICTURE.name}` shows the same figures."
    return "\n\n".join([table(header, rows), told, *builds, files])


def picture(result: Result) -> str:
    """Bars for each workload, each with the KL of its numbers behind it; an SVG of its own, with no fonts to fetch."""
    engines = by_engine(result)
    parts, y = [], 34
    for workload, name in SHOWN.items():
        shown = [(engine, cells[workload]) for engine, cells in engines.items() if workload in cells]
        most = max(s.median for _, s in shown)
        parts.append(f'<text x="0" y="{y}" font-weight="bold">{escape(name)}, tokens/s</text>')
        for engine, speed in shown:
            y += 22
            parts.append(_bar(engine, speed, most, y))
        y += 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 752 {y - 8}" width="752" role="img" '
        'font-family="sans-serif" font-size="13" fill="#212529">'
    )
    title = "<title>Speed beside accuracy, SmolLM2-135M-Instruct from its Q4_1 file</title>"
    ground = '<rect x="-12" y="0" width="100%" height="100%" fill="#ffffff"/>'
    caption = '<text x="0" y="14" fill="#495057">KL: how far answers are from float32; less is better</text>'
    return "\n".join([head, title, ground, caption, *parts, "</svg>"]) + "\n"


def _bar(engine: str, speed: Speed, most: float, y: int) -> str:
    width = 360 * speed.median / most
    colour = next((c for start, c in _COLOURS.items() if engine.startswith(start)), _OTHER)
    found = kl(engine, speed.numbers)
    told = f"{speed.median:,.0f}" + (f"   KL {found}" if found else "")
    return (
        f'<text x="0" y="{y}">{escape(engine)}</text>'
        f'<rect x="130" y="{y - 12}" width="{width:.0f}" height="15" rx="2" fill="{colour}"/>'
        f'<text x="{138 + width:.0f}" y="{y}" xml:space="preserve">{escape(told)}</text>'
    )


def written(readme: str) -> str:
    """The README with the table of the newest run between its marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{speed_table(newest())}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
    PICTURE.write_text(picture(newest()))
