"""Which precision each matrix product runs in: weights and activations, by one name or by a map of layer patterns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from millrace.errors import ConfigError, nearest
from millrace.kernels.precision import Precision

DEFAULT_GROUP = 128


# The head decides the ranking of all tokens and is read once a step: 4-bit engines keep it in 8.
_HEAD = {Precision.W4A8: Precision.W8A8, Precision.W4A16: Precision.W8A16}


@dataclass(frozen=True, slots=True)
class PrecisionMap:
    """The first pattern that matches a module's name (`layers.*.mlp.*`, shell style) decides; `default` the rest."""

    default: Precision
    patterns: tuple[tuple[str, Precision], ...] = ()
    group: int = DEFAULT_GROUP

    def of(self, origin: str) -> Precision:
        for pattern, precision in self.patterns:
            if _matches(origin, pattern):
                return precision
        return _HEAD.get(self.default, self.default) if origin.endswith("lm_head") else self.default

    def check_patterns(self, origins: Iterable[str]) -> None:
        """raises ConfigError for a pattern that is about none of the matrix products `origins`"""
        names = list(origins)
        for pattern, _ in self.patterns:
            if not any(_matches(name, pattern) for name in names):
                raise ConfigError(
                    f'the map of precisions has "{pattern}", which no layer of this model matches',
                    nearest(pattern, names),
                    "correct the pattern, or leave it out",
                )


def _matches(origin: str, pattern: str) -> bool:
    return fnmatchcase(origin, pattern) or fnmatchcase(origin, f"*.{pattern}")


def parse_precision(name: str) -> Precision:
    try:
        return Precision(name)
    except ValueError:
        raise ConfigError(
            f'precision "{name}" is unknown', "one of " + ", ".join(Precision), "choose one of them"
        ) from None


def precision_map(asked: str | Mapping[str, str], group: int = DEFAULT_GROUP) -> PrecisionMap:
    """From `"w4a8"`, or from a map like {"default": "w4a8", "lm_head": "bf16", "layers.0.*": "w8a8"}."""
    if group < 4 or group % 4 or group > 4096:
        raise ConfigError(f"a quantisation group of {group}", "a multiple of 4, at most 4096", "use 128")
    if isinstance(asked, str):
        return PrecisionMap(parse_precision(asked), group=group)
    if "default" not in asked:
        raise ConfigError("the map of precisions has no default", 'an entry "default"', 'add "default": "bf16"')
    patterns = tuple((p, parse_precision(v)) for p, v in asked.items() if p != "default")
    return PrecisionMap(parse_precision(asked["default"]), patterns, group)
