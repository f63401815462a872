"""`millrace doctor --device`: which precisions a GPU has, by the table that runs and purchases are refused by, too."""

from millrace.cli.screen import heading, note, pairs, print_json, table
from millrace.engine.cuda.found import known_gpu
from millrace.engine.cuda.precisions import abilities
from millrace.machine.devices import multiplied

_NO_MORE = {True: "fp32", False: "what layers do"}  # float32 all multiply, and codes of INT8 become floats


def examined(device: str, as_json: bool) -> None:
    """raises ConfigError for a name that nobody knows, MachineError for a GPU that is not here"""
    gpu = known_gpu(device)
    has, found = multiplied(gpu.architecture), list(abilities(gpu))
    if as_json:
        able = {
            one.asked.removeprefix("--"): {"multiplies": list(one.needed), "why_not": one.why_not or None}
            for one in found
        }
        print_json({"device": gpu.about, "architecture": gpu.architecture, "multiplies": list(has), "asked": able})
        return
    heading(gpu.about)
    pairs([("multiplies", ", ".join(has) or "nothing that is known here")])
    table(("asked for", "multiplies", "here"), [
        (one.asked, ", ".join(one.needed) or _NO_MORE[one.of_layers], "refused" if one.why_not else "yes")
        for one in found
    ])  # fmt: skip
    for why in dict.fromkeys(one.why_not for one in found if one.why_not):
        note(f"refused: {why}")
