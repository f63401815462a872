"""What can be measured of how a page looks, and of what it tells those who do not see it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

# WCAG 2.2, success criterion 1.4.3: text of normal size
CONTRAST = 4.5
_COLOURS = """() => {
  const style = getComputedStyle(document.documentElement), names = ["back", "panel", "text", "soft", "accent"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}"""


def nameless(page: "Page") -> list[str]:
    """The roles of what can be focused and has no name in the tree that screen readers are given."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in tree:
        can = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
        role = node.get("role", {}).get("value")
        if can.get("focusable") and role != "RootWebArea" and not node.get("name", {}).get("value", "").strip():
            found.append(str(role))
    assert len(tree) > 10, "there is a page"
    return found


def overflow(page: "Page") -> float:
    """Pixels by which the page is wider than the screen."""
    return float(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def contrasts(page: "Page") -> dict[str, float]:
    """Of each colour of text on each background, by WCAG's formula."""
    light = {name: _luminance(colour) for name, colour in page.evaluate(_COLOURS).items()}
    return {
        f"{text} on {back}": (max(light[text], light[back]) + 0.05) / (min(light[text], light[back]) + 0.05)
        for text in ("text", "soft", "accent")
        for back in ("back", "panel")
    }


def _luminance(colour: str) -> float:
    """Of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
