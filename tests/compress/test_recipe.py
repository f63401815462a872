"""Recipes: presets, files, and what no recipe says."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.compress.recipe import PRESETS, VERSION, parsed, read_recipe, to_dict
from millrace.errors import ConfigError

MIX = """
version = 1
bits = 4
group = 64
search = "llm-compressor"
[[layers]]
match = "*.mlp.down_proj"
bits = 8
group = "row"
[[layers]]
match = "model.layers.0.*"
method = "none"
[[layers]]
match = "*.v_proj"
method = "fp8"
"""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(to_dict(PRESETS[name])))
    assert read_recipe(str(path)) == PRESETS[name] == read_recipe(name)


def test_what_is_the_same_is_that_of_the_preset_before() -> None:
    """Where `--help` says so: the same form, whatever else differs."""
    last = None
    for recipe in PRESETS.values():
        one = recipe.usual
        form = (one.bits, one.group, one.fp8, one.method == "fp8-tensor", one.smooth)
        assert not recipe.about.startswith("the same") or form == last, recipe.name
        last = form


def test_keys_and_values() -> None:
    assert parsed({"version": 1}, "x").kv is None and parsed({"version": 1, "kv": "float"}, "x").kv is None
    for named in ("int8", "fp8", "int4"):
        kept = parsed({"version": 1, "kv": named}, "x")
        assert kept.kv == named and parsed(to_dict(kept), "x") == kept


def test_a_mix_by_layers(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text(MIX)
    mix = read_recipe(str(tmp_path / "mix.toml"))
    found = {
        n: mix.layer_recipe(f"model.layers.{n}") for n in ("3.mlp.down_proj", "0.mlp.up_proj", "3.q_proj", "3.v_proj")
    }
    assert [(t.method, t.bits, t.group, t.search) for t in found.values()] == [
        ("rtn", 8, 0, "llm-compressor"), ("none", 4, 64, "llm-compressor"), ("rtn", 4, 64, "llm-compressor"),
        ("fp8", 8, 0, "none"),
    ]  # fmt: skip
    assert parsed(to_dict(mix), "mix") == mix


WRONG: list[tuple[Any, list[str]]] = [
    ([], ["keys and values"]),
    ({}, ["version", f"version = {VERSION}"]),
    ({"version": True}, ["version is True"]),
    ({"version": VERSION + 1}, [f"of version {VERSION + 1}", "update"]),
    ({"version": 1, "bit": 4}, ["bit is unknown", '"bits"']),
    ({"version": 1, "bits": 3}, ["bits is 3", "4, 8"]),
    ({"version": 1, "minimums": 1}, ["minimums is 1", "true"]),
    ({"version": 1, "group": 100}, ["group is 100", '"row"']),
    ({"version": 1, "method": "magic"}, ["method is 'magic'", '"rtn"']),
    ({"version": 1, "method": "fp8", "bits": 4}, ["fp8", "8 bits"]),
    ({"version": 1, "bits": 8, "activations": 8}, ['group is 128', '"row"']),
    ({"version": 1, "bits": 8, "activations": "fp8"}, ["activations is 'fp8'", "fp8 beside 4"]),
    ({"version": 1, "activations": "fp4"}, ["activations is 'fp4'", '8, 16, "fp8"']),
    ({"version": 1, "method": "fp8", "smooth": "awq"}, ["fp8", "8 bits"]),
    ({"version": 1, "method": "fp8-tensor", "group": 32}, ["fp8-tensor", "8 bits"]),
    ({"version": 1, "smooth": "quant"}, ["smooth is 'quant'", '"smoothquant"']),
    ({"version": 1, "smooth": "smoothquant", "sizes": "mean"}, ["sizes is 'mean'", '"largest", "rms"']),
    ({"version": 1, "alpha": 1.5}, ["alpha is 1.5", "0 to 1"]),
    ({"version": 1, "alpha": True}, ["alpha is True"]),
    ({"version": 1, "alpha": float("nan")}, ["alpha is nan"]),
    ({"version": 1, "alfa": 0.5}, ["alfa is unknown", "alpha"]),
    ({"version": 1, "bits": 8, "minimums": True}, ["8 bits with minimums"]),
    ({"version": 1, "kv": "fp4"}, ["kv is 'fp4'", '"float", "int8", "fp8", "int4"']),
    ({"version": 1, "kv": ["int8"]}, ["kv is ['int8']"]),
    ({"version": 1, "method": "none", "prune": {"mlp": 0.1}, "kv": "int8"}, ["kv is 'int8'", "beside prune"]),
    ({"version": 1, "layers": [{"match": "*", "kv": "int8"}]}, ["layers[0].kv is unknown"]),
    ({"version": 1, "layers": {}}, ["layers is {}"]),
    ({"version": 1, "layers": [{"bits": 8}]}, ["layers[0].match is None"]),
    ({"version": 1, "layers": [{"match": "*", "bits": 5}]}, ["layers[0].bits is 5"]),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_what_no_recipe_says(i: int) -> None:
    said, says = WRONG[i]
    with pytest.raises(ConfigError) as error:
        parsed(said, "mine")
    assert all(word in str(error.value) for word in says), error.value


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("version =")
    (tmp_path / "b.json").write_text("[" * 100_000)
    (tmp_path / "d.json").write_text('{"version": 1, "bits": 8, "bits": 4}')
    (tmp_path / "c.toml").write_bytes(b"#" * ((1 << 20) + 1))
    for name, says in (
        ("int4_wo", 'did you mean "int4-wo"'), (str(tmp_path / "none.toml"), "No such file"),
        (str(tmp_path / "a.toml"), "is not TOML"), (str(tmp_path / "b.json"), "is not JSON"),
        (str(tmp_path / "c.toml"), "more than 1 MiB"), (str(tmp_path / "d.json"), '"bits" is there twice'),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            read_recipe(name)
