"""The README's table and picture, from the newest runs of a real model beside others: `python -m benchmarks.readme`."""

from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.processors import blocks, by_engine, decides, runs_by_processor
from benchmarks.runs import Result, Speed
from benchmarks.tables import SHOWN, kl

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speed.svg"
BEGIN, END = "<!-- benchmarks: written by python -m benchmarks.readme -->", "<!-- end of benchmarks -->"
_COLOURS = {"millrace": "#0b7285"}
_OTHER = "#adb5bd"


def newest() -> Result:
    """The run that the picture shows: the newest with rounds enough and nothing hidden, else the newest."""
    found = runs_by_processor()
    return next((r for r in found if decides(r) and not r.get("hidden")), found[0])


def tables() -> str:
    """One block for each kind of processor, the picture's first."""
    shown = newest()
    parts = []
    for block in sorted(blocks(), key=lambda b: b.run is not shown):
        text = block.text
        if block.run is shown:
            text += f" `docs/{PICTURE.name}` shows the same figures."
        parts.append(f"**{block.title}**\n\n{text}")
    return "\n\n".join(parts)


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
    found = kl(engine, speed.numbers, speed.own_kl)
    told = f"{speed.median:,.0f}" + (f"   KL {found}" if found else "")
    return (
        f'<text x="0" y="{y}">{escape(engine)}</text>'
        f'<rect x="130" y="{y - 12}" width="{width:.0f}" height="15" rx="2" fill="{colour}"/>'
        f'<text x="{138 + width:.0f}" y="{y}" xml:space="preserve">{escape(told)}</text>'
    )


def written(readme: str) -> str:
    """The README with the table of the newest run between its marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
    PICTURE.write_text(picture(newest()))
