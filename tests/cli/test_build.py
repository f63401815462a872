"""`millrace build` and `millrace inspect`."""

import json
import re
from pathlib import Path

from millrace.kernels.library import usable_isas
from tests.cli.conftest import Millrace


def test_the_closing_screen(millrace: Millrace, tmp_path: Path) -> None:
    result = millrace(
        "build", "tiny", "-o", tmp_path / "e", "--precision", "w8a8", "--max-context", "512", "--no-evaluate"
    )
    assert result.code == 0, result.err
    for said in ("weights", "KV cache", "activations", "peak memory", "program", "w8a8 g128", "512 tokens"):
        assert said in result.out
    assert re.search(r"tiny: built in [\d.]+ s", result.out)
    assert re.search(r"no plan needs less than [\d.]+ MiB", result.out)


def test_json_adds_up(millrace: Millrace, tmp_path: Path) -> None:
    told = json.loads(millrace("build", "tiny", "-o", tmp_path / "e", "--max-batch", "4", "--json").out)
    memory = told["memory"]
    assert memory["kv_bytes_batch"] == 4 * memory["kv_bytes_per_sequence"]
    assert memory["peak_bytes"] == sum(memory[k] for k in ("weights_bytes", "activation_bytes", "kv_bytes_batch"))
    assert memory["activation_lower_bound"] <= memory["activation_bytes"]
    assert memory["weights_bytes"] == (tmp_path / "e" / "weights.bin").stat().st_size
    assert sum(told["kernels"].values()) == told["calls"] < told["operations"]
    assert told["seconds"] > 0 and told["precision"] == {"default": "bf16"}


def test_a_map_of_precisions_decides_layer_by_layer(millrace: Millrace, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"default": "w4a8", "layers.0.*": "w8a8:32", "lm_head": "bf16"}))
    assert millrace("build", "tiny", "-o", tmp_path / "e", "--precision-map", file, "--no-evaluate").code == 0
    steps = json.loads(millrace("inspect", tmp_path / "e", "--calls", "--json").out)
    notes = {origin: s["note"] for s in steps if s["kernel"] == "matmul" for origin in s["origin"]}
    assert notes["model.layers.0.mlp.down_proj"] == "w8a8"
    assert notes["model.layers.1.mlp.down_proj"] == "w4a8"
    assert notes["lm_head"].startswith("bf16")
    assert "layers.0.* w8a8:32" in millrace("inspect", tmp_path / "e").out
    file.write_text(json.dumps({"default": "w4a8:96"}))
    refused = millrace("build", "tiny", "-o", tmp_path / "f", "--precision-map", file, "--no-evaluate")
    assert refused.code == 2 and "groups of 96 beside weights in groups of 128" in refused.err


def test_the_sums_of_bfloat16_are_a_choice_of_the_machine_or_the_user(millrace: Millrace, tmp_path: Path) -> None:
    """Each with answers of its own, which every CPU gives; the default goes by this one."""
    here = "tiles" if "amx" in usable_isas() else "pairs"
    for sums, flags in ((here, []), ("tiles", ["--bf16-sums", "tiles"]), ("pairs", ["--bf16-sums", "pairs"])):
        engine = tmp_path / f"{sums} {len(flags)}"
        assert millrace("build", "tiny", "-o", engine, "--tune", "0", *flags).code == 0
        assert json.loads(millrace("inspect", engine, "--json").out)["bf16_sums"] == sums
        assert ("bf16 summed by tiles" in millrace("inspect", engine).out) == (sums == "tiles")
        assert millrace("generate", engine, "Once", "--max-tokens", "2").code == 0
    millrace("build", "tiny", "-o", tmp_path / "e", "--bf16-sums", "rows").assert_mistake("pairs", "tiles")


def test_inspect_shows_layers_fusions_and_bytes(millrace: Millrace, built_tiny: Path) -> None:
    out = millrace("inspect", built_tiny).out
    assert re.search(r"model\.layers\.0 to 4 +10 +rms_norm matmul:w4a8 rope attention", out)
    assert re.search(r"5 +matmul +3 products merged +layers\.\*\.self_attn\.q_proj \+ k_proj \+ v_proj", out)
    assert "gate and up merged, gate * sigmoid(gate) * up in the epilogue" in out and "passes: fold_constants" in out
    assert "tactics" in out and "the lower bound is" in out and "w4g128" in out


def test_inspect_parts_agree_with_the_engine(millrace: Millrace, built_tiny: Path) -> None:
    summary, weights, memory, steps, graph = (
        json.loads(millrace("inspect", built_tiny, *part, "--json").out)
        for part in ([], ["--weights"], ["--memory"], ["--calls"], ["--graph"])
    )
    assert sum(w["bytes"] for w in weights) <= summary["memory"]["weights_bytes"]
    assert max(b["offset"] + b["bytes"] for b in memory) <= summary["memory"]["activation_bytes"]
    assert len(steps) == summary["calls"] and len(graph["nodes"]) == summary["operations"]
    rows = sum(len(graph[part]) for part in ("inputs", "nodes", "outputs"))
    for part, n in (("--weights", len(weights)), ("--calls", len(steps)), ("--graph", rows)):
        assert len(millrace("inspect", built_tiny, part).out.splitlines()) == n + 1


def test_inspect_finds_engines_of_the_cache_by_model(millrace: Millrace) -> None:
    millrace("inspect", "tiny").assert_mistake('no cached engine "tiny"', "the cache is empty")
    millrace("generate", "tiny", "-p", "Once", "--max-tokens", "1")
    assert "bf16" in millrace("inspect", "tiny").out
    millrace("inspect", "tony").assert_mistake('no cached engine "tony"')


def test_a_build_says_what_it_timed_and_tune_times_again(millrace: Millrace, tmp_path: Path) -> None:
    built = json.loads(millrace("build", "tiny", "-o", tmp_path / "e", "--tune", "60", "--json").out)["tactics"]
    assert built["regions"] == 6 and built["threads"] >= 1 and not built["note"]
    out = millrace("inspect", tmp_path / "e", "--tactics").out
    assert "sampled rows" in out and "tile_rows" in out and "rule" in out
    again = json.loads(millrace("tune", tmp_path / "e", "--threads", "1", "--seconds", "60", "--json").out)
    assert again["threads"] == 1 and len(again["regions"]) == 6
    shown = millrace("inspect", tmp_path / "e").out
    assert "for 1 thread on" in shown
    assert built["threads"] == 1 or f"also for {built['threads']};" in shown, "the build's own are still there"
    assert json.loads(millrace("inspect", tmp_path / "e", "--tactics", "--json").out) == again


def test_tuning_without_time_says_so(millrace: Millrace, engine: Path) -> None:
    millrace("tune", engine, "--seconds", "0.01", "--threads", "64").assert_mistake("nothing was timed", "--seconds")
    millrace("tune", engine, "--seconds", "nan").assert_mistake("nan")


def test_a_build_without_tuning_says_so(millrace: Millrace, tmp_path: Path) -> None:
    millrace("build", "tiny", "-o", tmp_path / "e", "--tune", "0")
    assert "never tuned" in millrace("inspect", tmp_path / "e").out
    assert json.loads(millrace("inspect", tmp_path / "e", "--tactics", "--json").out) is None


def test_a_build_of_ones_own_and_the_cache_s_are_one(millrace: Millrace, cache: Path, tmp_path: Path) -> None:
    assert (
        millrace("build", "tiny", "-o", tmp_path / "e", "--tune", "0", "--no-evaluate", "--precision", "w4a8").code == 0
    )
    assert len(json.loads((cache / "millrace" / "digests.json").read_text())) == 1, (
        "what was read once is not read again"
    )
    millrace("generate", "tiny", "-p", "Hi", "--max-tokens", "1", "--tune", "0", "--no-evaluate", "--precision", "w4a8")
    (cached,) = (cache / "millrace" / "engines").glob("tiny-*")
    built = {file.name: file.read_bytes() for file in (tmp_path / "e").iterdir()}
    assert built == {file.name: file.read_bytes() for file in cached.iterdir()}
