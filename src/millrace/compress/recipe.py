"""Recipes: the treatment of each linear layer. A recipe is a versioned file (TOML or JSON), or a preset's name.

version = 1
method = "rtn"            # of the decoder's linear layers: to nearest; "gptq"; "fp8" and "fp8-gptq", a scale per row;
                          # "fp8-tensor", a scale per matrix; "none" leaves floats; "wanda", "sparsegpt" set two of
                          # four weights to zero, without a smaller size
smooth = "none"           # folds scales into norms and preceding layers: "awq", "smoothquant"
alpha = 0.5               # SmoothQuant's, 0 to 1: how much of the activations' outliers moves into weights
sizes = "largest"         # SmoothQuant's sizes of inputs and weights: maxima, or "rms", root mean squares
bits = 4                  # 4 or 8
group = 128               # 32, 64, 128 or "row"; if it does not divide a layer's inputs, the next that does
minimums = false          # 4 bits only
scales = "compressed-tensors"  # or "model-optimizer", "gguf": the convention for ranges
search = "none"           # tries smaller ranges: "llm-compressor", "gptqmodel", "imatrix", "clip" (AutoAWQ's)
activations = 16          # bits of activations; 8 are of the weights' kind, or "fp8" with 4-bit weights
kv = "float"              # KV cache of engines of the folder; "int8", "fp8", "int4": scaled per token and head
[[layers]]                # exceptions; the first that matches applies, with the values above as defaults
match = "*.mlp.down_proj"
bits = 8
[prune]                   # only with method = "none": shares of MLP channels and query heads to remove
mlp = 0.25
heads = 0.34

These need statistics of a text (docs/calibration.md): "gptq", "wanda", "sparsegpt", prune, any smooth, and the
searches "imatrix" and "clip".
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from millrace.checkpoint.compressed.scheme import FP8 as FP8_CACHE
from millrace.checkpoint.compressed.scheme import INT4, INT8
from millrace.compress.methods.quantization_grid import (
    GPTQMODEL_MSE,
    GROUPS,
    IMATRIX_MSE,
    LLM_COMPRESSOR_MSE,
    Grid,
    RangeConvention,
    ScaleSearch,
)
from millrace.compress.methods.sparsity_2_4 import METHODS as SPARSE
from millrace.compress.methods.structured_pruning import Prune
from millrace.compress.presets import ABOUT
from millrace.errors import ConfigError, nearest
from millrace.settings import reject_duplicate_keys

VERSION = 1
ROW = "row"
_FLOAT = "float"  # the KV cache's name for no compression
_KV = (_FLOAT, INT8, FP8_CACHE, INT4)
_OF_ALL = ("version", "layers", "prune", "kv")  # keys of a recipe that are not part of a treatment
FP8, FP8_GPTQ, FP8_TENSOR = "fp8", "fp8-gptq", "fp8-tensor"
_FLOATS = (FP8, FP8_GPTQ, FP8_TENSOR)
METHODS = ("rtn", "gptq", *_FLOATS, "none", *SPARSE)
SMOOTH = ("none", "awq", "smoothquant")
RMS = "rms"
CLIP = "clip"  # the only search that is not a `ScaleSearch`
SEARCHES: Mapping[str, ScaleSearch | None] = {
    "none": None, "llm-compressor": LLM_COMPRESSOR_MSE, "gptqmodel": GPTQMODEL_MSE, "imatrix": IMATRIX_MSE,
    CLIP: None,
}  # fmt: skip
_MAX_BYTES, _MAX_LAYERS, _LONGEST = 1 << 20, 4096, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecipe:
    """The treatment of a layer; its fields are a recipe's keys."""

    method: str = "rtn"
    smooth: str = "none"
    alpha: float = 0.5
    sizes: str = "largest"
    bits: int = 4
    group: int = 128  # 0 for a whole row
    minimums: bool = False
    scales: RangeConvention = RangeConvention.COMPRESSED_TENSORS
    search: str = "none"
    activations: int | str = 16

    @property
    def calibrated(self) -> bool:
        """Whether it needs statistics of the layer's inputs."""
        if self.sparse or self.method == FP8_GPTQ:
            return True
        wants = self.method == "gptq" or self.smooth != "none" or self.search in ("imatrix", CLIP)
        return wants and self.method in ("rtn", "gptq")

    @property
    def fp8(self) -> bool:
        return self.method in _FLOATS

    @property
    def activation_bits(self) -> int:
        return self.activations if isinstance(self.activations, int) else 8

    @property
    def sparse(self) -> bool:
        """Whether weights stay floats, half of them zeros."""
        return self.method in SPARSE

    def grid(self, group: int) -> Grid:
        return Grid(self.bits, group, self.minimums, self.scales)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe. exceptions: the first whose pattern matches a layer's name applies; prune: replaces everything else

    kv: format of the KV cache; None: floats
    """

    name: str
    usual: LayerRecipe
    exceptions: tuple[tuple[str, LayerRecipe], ...] = ()
    about: str = field(default="", compare=False)  # of presets: the origin
    prune: Prune | None = None
    kv: str | None = None

    def layer_recipe(self, layer: str) -> LayerRecipe:
        return next((own for pattern, own in self.exceptions if fnmatchcase(layer, pattern)), self.usual)


_ROWS_OF_8 = LayerRecipe(bits=8, group=0, scales=RangeConvention.MODEL_OPTIMIZER)
PRESETS: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("int8-wo", _ROWS_OF_8, about=ABOUT["int8-wo"]),
        Recipe("int4-wo", LayerRecipe(), about=ABOUT["int4-wo"]),
        Recipe("int4-wo-mse", LayerRecipe(search="llm-compressor"), about=ABOUT["int4-wo-mse"]),
        Recipe("fp8", LayerRecipe(method="fp8", bits=8, group=0, activations=8), about=ABOUT["fp8"]),
        Recipe(
            "fp8-tensor", LayerRecipe(method="fp8-tensor", bits=8, group=0, activations=8), about=ABOUT["fp8-tensor"]
        ),
        Recipe("fp8-gptq", LayerRecipe(method="fp8-gptq", bits=8, group=0, activations=8), about=ABOUT["fp8-gptq"]),
        Recipe("int4-gptq", LayerRecipe(method="gptq"), about=ABOUT["int4-gptq"]),
        Recipe("int4-gptq-clip", LayerRecipe(method="gptq", search=CLIP), about=ABOUT["int4-gptq-clip"]),
        Recipe("int4-awq", LayerRecipe(smooth="awq", search=CLIP), about=ABOUT["int4-awq"]),
        Recipe("w4afp8-awq", LayerRecipe(smooth="awq", search=CLIP, activations=FP8), about=ABOUT["w4afp8-awq"]),
        Recipe("int8-sq", replace(_ROWS_OF_8, method="gptq", smooth="smoothquant", sizes=RMS, activations=8),
               about=ABOUT["int8-sq"]),
    )
}  # fmt: skip


def read_recipe(name: str) -> Recipe:
    """Read a preset or a file. raises ConfigError"""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f'there is no recipe "{name}"', f"a .toml or .json file, or {nearest(name, PRESETS)}",
                          "correct --recipe")  # fmt: skip
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "a recipe", "check the path") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB", "a recipe", "name another file")
    try:
        raw = (
            tomllib.loads(data.decode())
            if path.suffix == ".toml"
            else json.loads(data, object_pairs_hook=reject_duplicate_keys)
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {path.suffix[1:].upper()}: {error}", "a recipe", "correct it") from error
    return parsed(raw, path.stem)


def parsed(raw: object, name: str) -> Recipe:
    """Parse a recipe. raises ConfigError for an unknown key or an invalid value"""
    if not isinstance(raw, dict):
        raise _wrong(name, raw, "keys and values")
    version = raw.get("version")
    if type(version) is not int or version < 1:
        raise _wrong("version", version, f"version = {VERSION}")
    if version > VERSION:
        raise ConfigError(
            f"the recipe {name} is of version {version}", f"at most {VERSION}, which this Millrace knows",
            "update Millrace, or write the recipe anew",
        )  # fmt: skip
    layers = raw.get("layers", [])
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS or not all(isinstance(x, dict) for x in layers):
        raise _wrong("layers", layers, f"at most {_MAX_LAYERS} tables, each with a match")
    usual = _treatment({k: v for k, v in raw.items() if k not in _OF_ALL}, LayerRecipe(), "")
    exceptions = []
    for i, one in enumerate(layers):
        pattern = one.get("match")
        if not isinstance(pattern, str) or not 0 < len(pattern) <= _LONGEST:
            raise _wrong(f"layers[{i}].match", pattern, "a pattern of names, such as *.mlp.down_proj")
        own = {k: v for k, v in one.items() if k != "match"}
        exceptions.append((pattern, _treatment(own, usual, f"layers[{i}].")))
    prune = _prune(raw["prune"], usual, layers) if "prune" in raw else None
    return Recipe(name, usual, tuple(exceptions), prune=prune, kv=_kv(raw.get("kv", _FLOAT), prune))


def _kv(raw: object, prune: Prune | None) -> str | None:
    if not isinstance(raw, str) or raw not in _KV:
        raise _wrong("kv", raw, "one of " + ", ".join(map(json.dumps, _KV)))
    if prune and raw != _FLOAT:
        raise _wrong("kv", raw, f'"{_FLOAT}" beside prune, whose folder says nothing of precisions')
    return None if raw == _FLOAT else raw


def _prune(raw: object, default: LayerRecipe, layers: list[object]) -> Prune:
    """Parse the prune table. raises ConfigError if a share is invalid, or if layers have another treatment, too"""
    if not isinstance(raw, dict) or not raw or not raw.keys() <= {"mlp", "heads"}:
        raise _wrong("prune", raw, "a table with mlp, heads, or both")
    for key, value in raw.items():
        if type(value) not in (int, float) or not 0 < value < 1:
            raise _wrong(f"prune.{key}", value, "a share that goes, such as 0.25")
    if default.method != "none" or layers:
        raise ConfigError(
            "the recipe prunes and rounds", 'method = "none" and no layers, beside prune',
            "prune first, and compress what comes out with another recipe",
        )  # fmt: skip
    return Prune(**raw)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe in the form that `parsed` reads."""
    layers = [{"match": pattern, **_plain(own)} for pattern, own in recipe.exceptions]
    prune = {key: share for key, share in asdict(recipe.prune).items() if share} if recipe.prune else {}
    kv = {"kv": recipe.kv} if recipe.kv else {}
    more = {**({"layers": layers} if layers else {}), **({"prune": prune} if prune else {}), **kv}
    return {"version": VERSION, **_plain(recipe.usual), **more}


def _plain(recipe: LayerRecipe) -> dict[str, Any]:
    values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    return {**values, "group": recipe.group or ROW, "scales": str(recipe.scales)}


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "method": METHODS, "smooth": SMOOTH, "sizes": ("largest", RMS), "bits": (4, 8),
    "group": (*(g for g in GROUPS if g), ROW), "minimums": (True, False),
    "scales": tuple(map(str, RangeConvention)), "search": tuple(SEARCHES), "activations": (8, 16, FP8),
}  # fmt: skip


def _treatment(raw: Mapping[str, Any], default: LayerRecipe, where: str) -> LayerRecipe:
    for key, value in raw.items():
        if key == "alpha":
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise _wrong(f"{where}alpha", value, "0 to 1, such as 0.5")
        elif key not in _CHOICES:
            valid_keys = (*_CHOICES, "alpha")
            raise ConfigError(f"the recipe's {where}{key} is unknown", nearest(key, valid_keys), "correct the key")
        elif not any(value == choice and type(value) is type(choice) for choice in _CHOICES[key]):
            raise _wrong(f"{where}{key}", value, "one of " + ", ".join(json.dumps(c) for c in _CHOICES[key]))
    values = dict(raw)
    if "group" in values:
        values["group"] = 0 if values["group"] == ROW else values["group"]
    if "scales" in values:
        values["scales"] = RangeConvention(values["scales"])
    if values.get("method") in _FLOATS:  # they have a single format
        values = {
            "smooth": "none",
            "bits": 8,
            "group": 0,
            "minimums": False,
            "search": "none",
            "activations": 8,
            **values,
        }
    if values.get("method") in SPARSE:  # the recipe's other values do not apply to these
        values = {"smooth": "none", "search": "none", "minimums": False, "activations": 16, **values}
    treatment = replace(default, **values)
    _check(treatment, where)
    return treatment


def _check(treatment: LayerRecipe, where: str) -> None:
    if treatment.fp8:
        if (treatment.smooth, treatment.bits, treatment.group, treatment.minimums, treatment.search) != (
            "none",
            8,
            0,
            False,
            "none",
        ):
            raise _wrong(
                f"{where}method",
                treatment.method,
                "nothing beside it but activations: 8 bits, and the scales that it has",
            )
        return
    if treatment.activations == FP8 and treatment.bits != 4:
        raise _wrong(
            f"{where}activations", FP8, "8 or 16 beside 8-bit integers, which meet their own kind; fp8 beside 4"
        )
    if treatment.sparse:
        if (treatment.smooth, treatment.minimums, treatment.search, treatment.activations) != (
            "none",
            False,
            "none",
            16,
        ):
            raise _wrong(f"{where}method", treatment.method, "nothing beside it: its weights stay floats")
        return
    if treatment.bits == 8 and treatment.activations == 8 and treatment.group:
        raise _wrong(f"{where}group", treatment.group, '"row", with 8-bit weights and activations')
    treatment.grid(treatment.group)  # checks which values are compatible


def _wrong(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"the recipe's {key} is {value!r:.100}", expected, "correct the recipe")
