"""The README's table and picture, from the newest runs of a real model beside others: `python -m benchmarks.readme`."""

from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.processors import (
    builds,
    by_engine,
    decides,
    headline,
    measured,
    processor,
    runs_by_processor,
    sources,
    speeds_beside_kl,
)
from benchmarks.runs import Result, Speed, file_of
from benchmarks.tables import SHOWN, kl, table

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speed.svg"
BEGIN, END = "<!-- benchmarks: written by python -m benchmarks.readme -->", "<!-- end of benchmarks -->"
_COLOURS = {"millrace": "#0b7285"}
_OTHER = "#adb5bd"
_RATIOS = (
    "How many times as fast Millrace is, on each kind of processor that was measured; below 1 it is slower. Medians of"
    " ratios within a round; all tables: [docs/performance.md](docs/performance.md#by-processor)."
)


def newest() -> Result:
    """The run that the picture shows: the newest with rounds enough and nothing hidden, else the newest."""
    found = runs_by_processor()
    return next((r for r in found if decides(r) and not r.get("hidden")), found[0])


def tables() -> str:
    """The run of the picture, and ratios on each kind of processor, the picture's first."""
    shown = newest()
    parts = [
        f"**{processor(shown)}**", *speeds_beside_kl(shown), *builds(shown),
        f"{sources(shown)} `docs/{PICTURE.name}` shows the same figures.",
    ]  # fmt: skip
    rows, hosts = [], []
    for result in sorted(runs_by_processor(), key=lambda run: run is not shown):
        if found := headline(result):
            rows += [[processor(result) if row is found[0] else "", *row] for row in found]
            cores = f"{result['machine']['cores']} cores"
            remarks = " ".join(builds(result)) if result is not shown else ""
            hosts.append(f"- {processor(result)}; {cores}; {measured(result)}; {file_of(result)}. {remarks}".rstrip())
    if rows:
        header = ("processor", "Millrace beside", "KL, ours / theirs", *SHOWN.values())
        parts += [_RATIOS, table(header, rows), "\n".join(hosts)]
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
    width = 330 * speed.median / most
    colour = next((c for start, c in _COLOURS.items() if engine.startswith(start)), _OTHER)
    found = kl(engine, speed.numbers, speed.own_kl)
    told = f"{speed.median:,.0f}" + (f"   KL {found}" if found else "")
    return (
        f'<text x="0" y="{y}">{escape(engine)}</text>'
        f'<rect x="170" y="{y - 12}" width="{width:.0f}" height="15" rx="2" fill="{colour}"/>'
        f'<text x="{178 + width:.0f}" y="{y}" xml:space="preserve">{escape(told)}</text>'
    )


def written(readme: str) -> str:
    """The README with the table of the newest run between its marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
    PICTURE.write_text(picture(newest()))
