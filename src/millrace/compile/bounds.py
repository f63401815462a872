"""Checks of the dimensions of an engine, before it is built rather than when it is opened."""

from millrace.engine.artifact.manifest import Manifest, contradiction
from millrace.errors import ConfigError
from millrace.graph.types import Graph


def check_openable(manifest: Manifest) -> None:
    """Check that an engine of this network could be opened. raises ConfigError"""
    if what := contradiction(manifest):
        raise ConfigError(
            f"no engine can be made of {manifest.architecture}: it {what}",
            "logits of a language model are [R, vocabulary] beside inputs of T and S, vectors of an encoder [S, width]",
            "correct its signature, or call its outputs otherwise",
        )  # fmt: skip


def check_sequences(tokens: int, sequences: int, rows: int) -> None:
    """Check that a step has a token and a row of logits for each sequence. raises ConfigError"""
    if sequences > min(tokens, rows):
        raise ConfigError(
            f"S is at most {sequences}: more sequences than the {tokens} tokens (T) or the {rows} rows of logits (R) "
            "of a step", f"at most {min(tokens, rows)}: a token and a row for each",
            "lower S in the profile, or raise T and R (without a profile they follow max_batch)",
        )  # fmt: skip


def unbounded(graph: Graph, name: str, symbols: list[str]) -> ConfigError:
    """Return the error for a dimension without bounds, or bounds without a dimension.

    symbols: dimensions that a profile must name
    """
    having = {s.name: [p.name for p in graph.inputs if s in p.value.shape] for s in graph.symbols}
    what = (
        f"has no bounds; it is of the input {', '.join(having[name])}"
        if name in having
        else "is not a dimension of this model"
    )
    inputs = ", ".join(f"{p.name} {list(p.value.shape)}" for p in graph.inputs)
    profile = ", ".join(f'"{n}": Bounds(1, 8, 64)' for n in symbols or having)
    return ConfigError(
        f"the dimension {name!r:.60} {what}", f"bounds for {', '.join(symbols or having)}; the inputs are {inputs}",
        f"say how small, how large usually and how large at most: BuildOptions(profile={{{profile}}})",
    )  # fmt: skip
