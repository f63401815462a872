"""Reads `config.json` of any family: typed access, and a check of every key."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.checkpoint.config.config_keys import GENERATION_KEYS, HARMLESS, ONLY_AT
from millrace.checkpoint.config.declared_keys import DECLARED
from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.config.families.family import ModelFamily, Neutral
from millrace.errors import CheckpointError, close_matches, nearest, sanitize

CONFIG = "config.json"
MAX_LAYERS = 4096  # far more than any model has, so that a wrong value is refused at once
MAX_KEYS = 40  # listed in a note
DTYPES = ("float32", "float16", "bfloat16")
Raw = Mapping[str, object]


def wrong(key: str, value: object, expected: str, fix: str = "", source: str = CONFIG) -> CheckpointError:
    fix = fix or f"check that {source} belongs to this model and is complete"
    return CheckpointError(f"{source}: {key} is {value!r:.200}", expected, fix)


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Typed access to a config.json. Every method raises CheckpointError that names the key.

    source: what errors call the file
    """

    raw: Raw
    source: str = field(default=CONFIG, kw_only=True)

    def get(self, key: str) -> object:
        return self.raw.get(key)

    def positive_int(self, key: str, missing: int | None = None, high: int = 2**31 - 1) -> int:
        """Return a positive integer. missing: the value if the key is null; without it null is an error."""
        value = self.get(key)
        if value is None and missing is not None:
            return missing
        return self._integer(key, value, 1, high)

    def first_int(self, *keys: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        """Return the integer of the first key that is there: families use several names for one size."""
        for key in keys:
            if (value := self.get(key)) is not None:
                return self._integer(key, value, low, high)
        if default is None:
            raise CheckpointError(f"{self.source} has no {keys[0]}", "the sizes of a decoder", "complete it")
        return default

    def positive_float(self, key: str) -> float:
        return positive_number(key, self.get(key))

    def boolean(self, key: str, missing: bool | None = None) -> bool:
        """Return a boolean. missing: as for `positive_int`"""
        value = self.get(key)
        if value is None and missing is not None:
            return missing
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def name(self, key: str) -> str:
        """Return a string; "" if there is none."""
        value = self.get(key)
        if not isinstance(value, str | None):
            raise self._wrong(key, value, "a name")
        return value or ""

    def names(self, key: str) -> list[str]:
        """Return a list of strings; [] if there is none."""
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise self._wrong(key, value, "a list of names")
        return value or []

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        return wrong(key, value, expected, source=self.source)


@dataclass(frozen=True, slots=True)
class ConfigReader(ConfigKeys):
    """Typed access with a family's defaults."""

    family: ModelFamily

    def get(self, key: str) -> object:
        return self.raw.get(key, self.family.defaults.get(key))


def positive_number(key: str, value: object) -> float:
    """Return a finite number above zero (a bool is not a number here). raises CheckpointError"""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise wrong(key, value, "a positive number")
    return float(value)


# Shown where no name is near to an unknown one: there are too many to show all.
_COMMON = (
    "BertModel", "Gemma3ForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "MistralForCausalLM",
    "MixtralForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip


def family_of(raw: Raw) -> ModelFamily:
    """Return the family by architecture, otherwise by model type. raises CheckpointError if it is not supported"""
    by_architecture = {
        name: family
        for family in FAMILIES.values()
        for name in (family.architecture, *family.also, family.cross_encoder)
        if name
    }
    names = raw.get("architectures")
    model_type = raw.get("model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if names is not None and (not isinstance(name, str) or name not in by_architecture):
        shown = names if name is None else name
        raise CheckpointError(
            f"config.json: the architecture is {shown!r}, which is not supported",
            f"{nearest(name if isinstance(name, str) else '', by_architecture, _COMMON)} (docs/models.md lists all)",
            "choose a checkpoint of a supported family, or run this one in PyTorch, slowly: --model-impl transformers",
        )
    if isinstance(name, str):
        family = by_architecture[name]
        if model_type not in (None, family.name):
            raise wrong("model_type", model_type, f'"{family.name}", because architectures says {name}')
        return family
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: no architectures, and model_type is {model_type!r}",
            f"architectures, or a model_type: {nearest(str(model_type or ''), FAMILIES)}",
            "choose a checkpoint of a supported family, or add architectures to config.json",
        )
    return FAMILIES[model_type]


def check_keys(raw: Raw, family: ModelFamily) -> tuple[str, ...]:
    """Check that every key is used, has no effect, or has a value without effect; return notes.

    A key that transformers' configuration class declares and that is in no table here must have its default. Keys that
    the class does not declare are not read by transformers either: all of them are listed in one note.
    """
    used = {"architectures", "model_type", "dtype", "torch_dtype", *family.defaults}
    declared = DECLARED.get(family.name, {})
    notes: list[str] = []
    undeclared: list[str] = []
    for key, value in raw.items():
        if key in family.only_at:
            _check_neutral(key, value, family.only_at[key])
        elif key in used or key in HARMLESS:
            continue
        elif key in GENERATION_KEYS:
            notes.append(f"config.json's {key} is not used: generation defaults are read from generation_config.json")
        elif key in ONLY_AT:
            _check_neutral(key, value, ONLY_AT[key])
        elif key in declared:
            _check_neutral(key, value, ((None, declared[key]), f"this key of {family.architecture} is not supported"))
        else:
            undeclared.append(key)
    if undeclared:
        notes.append(unread_keys("config.json", undeclared, used))
    return tuple(notes)


def unread_keys(where: str, keys: Sequence[str], used: Collection[str]) -> str:
    """Return the note that `keys` have no effect, with the probable key for a misspelled one."""
    shown = [
        key if (meant := close_matches(key, used)) is None else f"{key} (did you mean {meant}?)"
        for key in keys[:MAX_KEYS]
    ]
    more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
    return sanitize(f"{where}: not read, because no model of this type uses them: {', '.join(shown)}{more}")


def _check_neutral(key: str, value: object, accepted: Neutral) -> None:
    neutral, why = accepted
    if not any(value == v and type(value) is type(v) for v in neutral):
        words = {"None": "null", "True": "true", "False": "false"}
        allowed = " or ".join(words.get(str(v), str(v)) for v in neutral)
        raise wrong(key, value, f"{allowed}: {why}", "choose a checkpoint without it")


HEAD_SIZES = "a multiple of 8, at most 512: no kernel takes others"


def head_fits(head_dim: int) -> bool:
    """Return whether the head size is one of HEAD_SIZES."""
    return head_dim % 8 == 0 and head_dim <= 512


def read_dtype(raw: Raw) -> str:
    """Return the type: `dtype` takes precedence over `torch_dtype`, as in transformers; float32 if neither is there."""
    value = raw.get("dtype")
    value = raw.get("torch_dtype") if value is None else value
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise wrong("dtype", value, "one of " + ", ".join(DTYPES), "convert the weights to one of these")
    return name


MAX_IDS = 1024  # stop token ids; published models have up to a dozen


def token_ids(file: str, key: str, value: object) -> tuple[int, ...]:
    """Parse an id, a list of ids or null into a tuple. raises CheckpointError"""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > MAX_IDS:
        raise CheckpointError(f"{file}: {key} has {len(values)} ids", f"at most {MAX_IDS}", f"correct {key}")
    for i in values:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31:
            raise CheckpointError(f"{file}: {key} is {value!r}", "an id, a list of ids or null", f"correct {key}")
    return tuple(dict.fromkeys(values))
