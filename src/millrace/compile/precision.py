"""The precision of each matmul, for weights and activations: one name, or a map of layer patterns."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat
from millrace.errors import ConfigError, nearest
from millrace.kernels.precision import Precision
from millrace.model.families import HEAD

DEFAULT_GROUP = 128


# The head makes the distribution of all tokens. Unless requested otherwise, it has 8-bit integers if layers have 4, or
# E4M3. In W4A8 it takes two steps: all tokens in 4 bits, then the RESCORED most likely ones again in 8. That keeps the
# ranking of most tokens, but not the distribution: a KL of 0.009 alone on a real model, for half the bytes. E4M3 has 3
# mantissa bits and costs 0.013 there; integers of as many bytes, with group scales, cost 0.0005.
_HEAD = {
    Precision.W4A8: Precision.W8A8, Precision.W4A16: Precision.W8A16, Precision.FP8A16: Precision.W8A16,
}  # fmt: skip
RESCORED = 256


@dataclass(frozen=True, slots=True)
class PrecisionMap:
    """Precisions by module name. The first matching pattern (`layers.*.mlp.*`, shell style) decides; `default` the
    rest.

    group: of weights that are quantized here; stored_groups: integer weights of a checkpoint keep their own groups
    """

    default: Precision
    patterns: tuple[tuple[str, Precision], ...] = ()
    group: int = DEFAULT_GROUP
    head: Precision | None = None  # requested for the head; None: derived from `default`
    x_groups: tuple[tuple[str, int], ...] = ()  # where they differ from the weights', by pattern; "": of the rest
    stored_groups: bool = False

    def precision_of(self, name: str, *, is_head: bool = False) -> Precision:
        for pattern, precision in self.patterns:
            if _matches(name, pattern):
                return precision
        if not is_head:
            return self.default
        return self.head or _HEAD.get(self.default, self.default)

    def x_group_of(self, name: str, *, is_head: bool = False) -> int:
        """Return how many elements share a scale in its 8-bit activations; 0: as in its weights, or there are none."""
        decides = next((pattern for pattern, _ in self.patterns if _matches(name, pattern)), "")
        return dict(self.x_groups).get(decides, 0) if self.precision_of(name, is_head=is_head).takes_bytes else 0

    def stored_format(self, stored: QuantisedFormat | None, precision: Precision) -> QuantisedFormat | None:
        """Return the checkpoint's codes that a matmul in this precision keeps; None: its weights are quantized here."""
        if stored is None or not precision.coded or stored.bits > precision.bits:
            return None
        if stored.e4m3 or not precision.quantised:
            return stored if stored.e4m3 and not precision.quantised else None
        return stored if self.stored_groups or stored.group == self.group else None

    @property
    def meaning(self) -> "PrecisionSpec":
        """The specification: equal if equal engines follow from it, for a model whose head has the usual name."""
        rows = dict(self.x_groups)
        other_patterns = [("", self.default), *(p for p in self.patterns if p[0] != HEAD)]
        layers = tuple((pattern, precision, rows.get(pattern, 0)) for pattern, precision in other_patterns)
        head = (self.precision_of(HEAD, is_head=True), self.x_group_of(HEAD, is_head=True))
        meant = PrecisionSpec(layers, head, self.group, self.stored_groups)
        quantised = any(p.quantised for p in Precision if meant.uses(p))
        return meant if quantised else replace(meant, group=0, stored_groups=False)

    def described(self, head: str | None) -> dict[str, str]:
        """Return the map as in manifests: `default`, the head if it differs, patterns. head: its name, or None"""
        rows = dict(self.x_groups)
        default = _layer_text(self.default, rows.get("", 0))
        own = default
        if head is not None:
            own = _layer_text(self.precision_of(head, is_head=True), self.x_group_of(head, is_head=True))
        different = {} if own == default else {HEAD: own}
        named = {p: _layer_text(v, rows.get(p, 0)) for p, v in self.patterns if p not in different}
        return {"default": default, **different, **named}

    def check_head(self, head: str) -> None:
        """Check that only one precision is requested for the head of this name. raises ConfigError"""
        if self.head and self.names(head):
            raise ConfigError("the head's precision is given twice", "--head or a pattern in the map", "leave one out")

    def names(self, name: str) -> bool:
        """Return whether a pattern matches this module."""
        return any(_matches(name, pattern) for pattern, _ in self.patterns)

    def check_patterns(self, origins: Iterable[str]) -> None:
        """Check that each pattern matches one of the matmuls `origins`. raises ConfigError"""
        names = list(origins)
        for pattern, _ in self.patterns:
            if not any(_matches(name, pattern) for name in names):
                raise ConfigError(
                    f'the map of precisions has "{pattern}", which no layer of this model matches',
                    nearest(pattern, names),
                    "correct the pattern, or leave it out",
                )


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """A precision map in normal form.

    layers: by pattern, "" for modules that none matches, with activation groups if they differ from the weights', or 0;
    head: likewise; group 0: nothing is quantized
    """

    layers: tuple[tuple[str, Precision, int], ...]
    head: tuple[Precision, int]
    group: int
    stored_groups: bool

    def uses(self, precision: Precision) -> bool:
        return precision in (self.head[0], *(p for _, p, _ in self.layers))


def plain_format(precision: Precision) -> str:
    """Return the format of tables, and the default of the KV cache: float32 in float32 engines only."""
    return "f32" if precision == Precision.FP32 else "bf16"


_FLOATS = {"float32": Precision.FP32, "float16": Precision.FP32, "bfloat16": Precision.BF16}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """How a checkpoint stores the matrix of one linear layer.

    codes: its integer format; None: floats, or codes that only floats represent exactly
    byte_rows: its input rows are meant to be 8-bit; otherwise 16-bit floats
    fp8_rows: its input rows are meant to be E4M3 with a scale per token; 16-bit floats replace that here
    """

    dtype: str
    n_weights: int
    codes: QuantisedFormat | None = None
    byte_rows: bool = True
    fp8_rows: bool = False

    @property
    def nearest(self) -> Precision:
        """The class that represents it with the fewest bits per weight."""
        if self.codes is None:
            return _FLOATS.get(self.dtype, Precision.BF16)
        if self.codes.e4m3:
            return Precision.FP8A16
        eight, sixteen = (
            (Precision.W4A8, Precision.W4A16) if self.codes.bits <= 4 else (Precision.W8A8, Precision.W8A16)
        )
        return eight if self.byte_rows else sixteen


def joined_matrices(a: StoredMatrix, b: StoredMatrix) -> StoredMatrix:
    """Return how matrices that become one are stored: as the one with more bits if they differ; floats have most."""
    finer = a if a.codes is None or (b.codes is not None and a.codes.bits >= b.codes.bits) else b
    return replace(finer, n_weights=a.n_weights + b.n_weights, byte_rows=a.byte_rows and b.byte_rows)


def nearest_precisions(stored: Mapping[str, StoredMatrix]) -> PrecisionMap:
    """Map each linear layer, by name, to the class nearest to its stored type; the most common one is the default."""
    nearest = {name: matrix.nearest for name, matrix in stored.items()}
    sizes: Counter[Precision] = Counter()
    for name, matrix in stored.items():
        sizes[nearest[name]] += matrix.n_weights
    groups: Counter[int] = Counter()
    for matrix in stored.values():
        groups[_like(matrix.codes)] += matrix.n_weights
    integers = any(matrix.codes and not matrix.codes.e4m3 for matrix in stored.values())
    group = groups.most_common(1)[0][0] if integers else DEFAULT_GROUP
    plain = PrecisionMap(sizes.most_common(1)[0][0], group=group, stored_groups=integers)
    stored_format = [(n, p) for n, p in nearest.items() if p != plain.precision_of(n, is_head=n == HEAD)]
    return replace(plain, patterns=tuple(stored_format))


def _like(stored: QuantisedFormat | None) -> int:
    """Return the groups of weights quantized here, besides such codes: those of a file's blocks, otherwise our own."""
    return max(stored.group, 32) if stored and not stored.e4m3 and stored.group <= DEFAULT_GROUP else DEFAULT_GROUP


def with_head_precision(chosen: PrecisionMap, stored: Mapping[str, StoredMatrix]) -> PrecisionMap:
    """Give the head the layers' precision if nothing is requested for it, and that keeps the checkpoint's codes."""
    requested = chosen.head or chosen.names(HEAD) or chosen.precision_of(HEAD, is_head=True) == chosen.default
    if requested or HEAD not in stored or not chosen.stored_format(stored[HEAD].codes, chosen.default):
        return chosen
    return replace(chosen, head=chosen.default)


def rounding_notes(stored: Mapping[str, StoredMatrix], chosen: PrecisionMap) -> tuple[str, ...]:
    """Return notes: which stored codes are quantized again, and to what; which take more memory."""
    rounded: Counter[tuple[str, Precision, str]] = Counter()
    widened: Counter[str] = Counter()
    floats: Counter[str] = Counter()
    for name, matrix in stored.items():
        precision, codes = chosen.precision_of(name, is_head=name == HEAD), matrix.codes
        if codes is None and precision == Precision.BF16 and matrix.dtype not in _FLOATS:
            floats[matrix.dtype] += 1
        if codes is None or precision == Precision.FP32:
            continue
        if not chosen.stored_format(codes, precision):
            rounded[matrix.dtype, precision, _why(codes, precision, chosen.stored_groups)] += 1
        elif codes.bits not in (4, precision.bits):
            widened[matrix.dtype] += 1
    again = (
        f"{n} of {len(stored)} matrices are stored as {dtype.upper()} and rounded again, from their exact values, "
        f"to {precision}"
        + (f" with groups of {chosen.group}" if precision.quantised else "")
        + f" ({_WORDS[precision]}){why}"
        for (dtype, precision, why), n in rounded.items()
    )
    wider = (
        f"{n} of {len(stored)} matrices are stored as {dtype.upper()} and kept exactly, their codes in eight bits each"
        for dtype, n in widened.items()
    )
    plain = (
        f"{n} of {len(stored)} matrices are stored as {dtype.upper()} and computed as 16-bit floats: no 8-bit integers "
        "with float16 scales stand for them exactly"
        for dtype, n in floats.items()
    )
    return (*again, *wider, *plain)


_WORDS = {
    Precision.BF16: "16-bit floats", Precision.W8A8: "8-bit weights and activations",
    Precision.W8A16: "8-bit weights, 16-bit activations", Precision.W4A8: "4-bit weights, 8-bit activations",
    Precision.W4A16: "4-bit weights, 16-bit activations", Precision.FP8A16: "FP8 weights, 16-bit activations",
}  # fmt: skip


def _why(stored: QuantisedFormat, precision: Precision, stored_groups: bool) -> str:
    """Return the reason, for the end of a note."""
    if stored.e4m3:
        return f"; {Precision.FP8A16} would keep them exactly"
    if not precision.coded:
        return ""
    exact = "w4a8" if stored.bits <= 4 else "w8a8"
    return f"; {exact}{'' if stored_groups else ' without --group'} would keep them exactly"


def _matches(origin: str, pattern: str) -> bool:
    return fnmatchcase(origin, pattern) or fnmatchcase(origin, f"*.{pattern}")


_FLOAT16 = "float16 is for a GPU: here fp32 runs a float16 checkpoint exactly, bf16 in half the memory"
MEANT = {
    "fp16": _FLOAT16, "float16": _FLOAT16, "f16": _FLOAT16, "half": _FLOAT16,
    "float32": "use fp32", "f32": "use fp32", "float": "use fp32", "bfloat16": "use bf16",
    "tf32": "tf32 is for a GPU: use fp32",
    "int8": "use w8a8 (8-bit weights and activations) or w8a16 (8-bit weights alone)",
    "int4": "use w4a8 (4-bit weights, 8-bit activations) or w4a16 (4-bit weights alone)",
    "fp8": "use fp8a16 (E4M3 weights; activations stay bfloat16): with E4M3 activations it is for a GPU, with --device",
    "auto": "auto is chosen for the whole model, in small letters: --precision auto, without a map",
}  # fmt: skip


def parse_precision(name: str) -> Precision:
    try:
        return Precision(name)
    except ValueError:
        fix = MEANT.get(name.lower(), "choose one of them, or auto for the whole model")
        expected = f"one of {', '.join(Precision)}; or auto, for the whole model alone"
        raise ConfigError(f'precision "{name}" is unknown', expected, fix) from None


MAX_PATTERNS, _LONGEST = 4096, 200  # of a map; characters of a pattern


def _layer_text(precision: Precision, x_group: int) -> str:
    """Format a layer's precision as `_parse_layer` reads it."""
    return f"{precision}:{x_group}" if x_group else precision.value


def _parse_layer(value: str) -> tuple[Precision, int]:
    """Parse "w8a8" or, with separate activation groups, "w8a8:32"; 0: as the weights."""
    name, colon, rows = value.partition(":")
    if "min" in value.lower():
        raise ConfigError(
            f'"{value}" asks for minimums',
            "a precision alone: minimums are kept where a checkpoint stores them (Q4_1, Q5_1, Q4_K, Q5_K of a GGUF), "
            "and weights that are rounded here have none",
            "leave them out",
        )  # fmt: skip
    precision = parse_precision(name)
    if not colon:
        return precision, 0
    if not precision.takes_bytes:
        raise ConfigError(
            f'"{value}": activations of {precision} have no groups', "8-bit activations, as in w8a8:32 or w4a8:32",
            f'write "{precision}"',
        )  # fmt: skip
    if not (rows.isascii() and rows.isdigit() and len(rows) <= 4 and 8 <= int(rows) <= 4096 and int(rows) % 8 == 0):
        raise ConfigError(
            f'"{value}": activations in groups of "{rows}"', "a multiple of 8 that divides the weights' groups",
            f"use {precision}:32",
        )  # fmt: skip
    return precision, int(rows)


def check_x_group(name: str, x_group: int, group: int) -> None:
    """Check that groups of `x_group` activations divide the weights' groups. raises ConfigError"""
    if x_group != group and (x_group > group or group % x_group or x_group % 8):
        fitting = ", ".join(str(n) for n in range(8, group, 8) if group % n == 0)
        raise ConfigError(
            f"{name}: activations in groups of {x_group} beside weights in groups of {group}",
            f"groups of activations in a multiple of 8 that divides those of the weights: {fitting or 'none here'}",
            "correct the precision, or give another --group",
        )  # fmt: skip


def precision_map(
    requested: str | Mapping[str, str],
    group: int = DEFAULT_GROUP,
    head: str | None = None,
    *,
    stored_groups: bool = False,
) -> PrecisionMap:
    """Return a map from `"w4a8"`, or from a dict like {"default": "w4a8", "lm_head": "bf16", "layers.0.*": "w8a8:32"}.

    head: for the head alone, which the map then must not name; stored_groups: as in PrecisionMap. raises ConfigError
    """
    if group < 4 or group % 4 or group > 4096:
        raise ConfigError(f"a quantisation group of {group}", "a multiple of 4, at most 4096", "use 128")
    of_head = parse_precision(head) if head else None
    requested = {"default": requested} if isinstance(requested, str) else requested
    if len(requested) > MAX_PATTERNS or any(len(text) > _LONGEST for pair in requested.items() for text in pair):
        raise ConfigError(
            f"a map of {len(requested):,} precisions, or with patterns of more than {_LONGEST} characters",
            f"at most {MAX_PATTERNS:,}, for whole groups of layers",
            'name layers by patterns such as "layers.*.mlp.*"',
        )  # fmt: skip
    if "default" not in requested:
        raise ConfigError("the map of precisions has no default", 'an entry "default"', 'add "default": "bf16"')
    default, rows = _parse_layer(requested["default"])
    layers = {pattern: _parse_layer(value) for pattern, value in requested.items() if pattern != "default"}
    patterns = tuple((pattern, precision) for pattern, (precision, _) in layers.items())
    requested_rows = {"": rows, **{pattern: own for pattern, (_, own) in layers.items()}}
    usual = 0 if stored_groups else group  # the default, left out
    x_groups = tuple((pattern, own) for pattern, own in requested_rows.items() if own not in (0, usual))
    return PrecisionMap(default, patterns, group, of_head, x_groups, stored_groups)
