"""What happens before the first token: building from a checkpoint, starting a process, and what it holds in memory.

    python -m benchmarks.start --shape tinyllama-1.1b
    python -m benchmarks.start --shape tinyllama-1.1b --precision auto --rounds 1

Writes a checkpoint of random bfloat16 weights as Hugging Face lays it out, so the page cache holds it; builds an engine
with the command line, then starts processes that answer a prompt of 32 tokens with one. Writes
results/start-SHAPE-TIME-COMMIT.json.
"""

import json
import os
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.names import named
from benchmarks.record import judged, provenance, shape_command
from benchmarks.shapes import SHAPES, random_source
from millrace.checkpoint.config import ModelConfig
from millrace.engine.engine import Engine
from millrace.kernels.convert.ref import to_bf16

CONTEXT, PROMPT = 2048, 32
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Asks as a program would, and tells what of its own memory is neither weights nor KV pages.
ASK = """
import json, sys
from pathlib import Path
from millrace import LLM, SamplingParams
with LLM(sys.argv[1], kv_memory="64M") as llm:
    llm.generate({"prompt_token_ids": [5] * int(sys.argv[2])}, SamplingParams(max_tokens=1, temperature=0))
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    plan = llm._opened.plan
    rss = int(lines["VmRSS"].split()[0]) * 1024
    print(json.dumps({"rss": rss, "weights": plan.weights_bytes, "kv": plan.kv_bytes}))
"""


def write_checkpoint(shape: str, folder: Path) -> None:
    """config.json, one file of safetensors in bfloat16, a tokenizer of bytes and a template that adds nothing."""
    config, source = SHAPES[shape], random_source(shape, CONTEXT)
    sizes = {n: s for n, s in source.weights.shapes.items() if not (config.tie_embeddings and n == "lm_head.weight")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(config)))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config.vocab_size)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    header, at = {}, 0
    for name, size in sizes.items():
        end = at + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in sizes:
            rounded = to_bf16(source.weights.load(name).astype(np.float32))
            out.write((rounded.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def _config(c: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [c.architecture], "model_type": c.family, "hidden_size": c.hidden_size, "torch_dtype": c.dtype,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "vocab_size": c.vocab_size, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta, "tie_word_embeddings": c.tie_embeddings,
        "hidden_act": c.activation, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _tokenizer(n: int) -> dict[str, Any]:
    """One token a byte; the others are never met."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [*sorted(ByteLevel.alphabet()), *(f"<{i}>" for i in range(n))][:n]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }  # fmt: skip


def timed(*command: str | Path) -> float:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "millrace", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"millrace {command[0]} failed:\n{done.stderr}")
    return time.perf_counter() - started


def goals(precision: str, build_s: float, start_s: float, beyond_bytes: int) -> list[dict[str, Any]]:
    """What this project set out to reach."""
    what, bound_s = ("build with a choice of precision", 60) if precision == "auto" else ("build", 15)
    return [
        judged(f"{what}, seconds", build_s, bound_s, bound_s, at_most=True),
        judged("process start to first token, seconds", start_s, 1.0, 1.0, at_most=True),
        judged("resident beyond weights and KV, MiB", beyond_bytes / 2**20, 150, 150, at_most=True),
    ]


def run(shape: str, precision: str, rounds: int, folder: Path) -> dict[str, Any]:
    checkpoint = folder / "checkpoint"
    write_checkpoint(shape, checkpoint)
    builds = []
    for i in range(2):
        engine = folder / f"engine{i}"
        builds.append(timed("build", checkpoint, "-o", engine, "--precision", precision))
    ask = ("generate", engine, "-p", "a" * PROMPT, "--max-tokens", "1", "--temperature", "0")
    timed(*ask)  # warms the page cache
    starts = [timed(*ask) for _ in range(rounds)]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    held = json.loads(subprocess.check_output([sys.executable, "-c", ASK, engine, str(PROMPT)], text=True, env=env))
    build_s, start_s = statistics.median(builds), statistics.median(starts)
    beyond = held["rss"] - held["weights"] - held["kv"]
    return {
        **provenance("benchmarks.start"), "shape": shape, "precision": precision, **named(Engine.open(engine)),
        "build_s": build_s, "builds_s": builds, "start_to_first_token_s": start_s, "starts_s": starts,
        "resident_bytes": held["rss"], "weights_bytes": held["weights"], "kv_bytes": held["kv"],
        "resident_beyond_bytes": beyond,
        "goals": goals(precision, build_s, start_s, beyond),
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    return "\n".join([
        f"{result['shape']} {result['precision']}",
        f"  build, checkpoint in the page cache   {result['build_s']:.1f} s",
        f"  process start to first token          {result['start_to_first_token_s']:.2f} s",
        f"  resident beyond weights and KV        {result['resident_beyond_bytes'] / 2**20:.0f} MiB",
    ])  # fmt: skip


if __name__ == "__main__":
    shape_command("start", __doc__, run, summary)
