"""What is fuzzed: each function prepares good files in a folder, and gives the case that breaks one and opens it."""

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.compressed.scheme import KEY as COMPRESSION
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import (
    MANIFEST,
    PROGRAM,
    UNREADABLE,
    FileEntry,
    file_checksum,
    read_manifest,
    sealed,
)
from millrace.engine.artifact.tactics import TACTICS, Choice, TacticTable, TunedRegion, write_tactics
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import ExecutionError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import fingerprint
from tests.fuzz.driver import Case
from tests.fuzz.gpu_engines import gpu_engines
from tests.fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from tests.fuzz.originals import SENTENCES, write_checkpoint, write_encoder
from tests.fuzz.schemas import structured
from tests.fuzz.tensor_models import pbtxt, tensors
from tests.support.compressed_files import Kind, write_compressed
from tests.support.networks import encoder, packed, texts
from tests.support.vocabularies import save_byte_level, save_sentencepiece

_LOADED_BYTES = 1 << 20  # larger tensors are not read: what is tested is what files say of themselves


def _use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The mill <s> runs\u00e9\n  past")
    tokenizer.decode([*ids[:50], 0, 5, tokenizer.vocab_size - 1, tokenizer.vocab_size + 7])


def _load(tensors: Tensors) -> None:
    for name, info in tensors.items():
        if info.nbytes <= _LOADED_BYTES:
            tensors.load(name)


def safetensors(folder: Path) -> Case:
    good = (write_checkpoint(folder / "good") / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    path = folder / "model.safetensors"

    def case(rng: Random) -> None:
        if rng.random() < 0.3:
            path.write_bytes(mutate_bytes(rng, good))
        else:
            said = json_bytes(rng, mutate_json(rng, header))
            said += b" " * (-len(said) % 8)
            path.write_bytes(struct.pack("<Q", len(said)) + said + data[: rng.choice([None, None, None, -1, 0])])
        _load(Tensors.open(folder))

    return case


def gguf(folder: Path) -> Case:
    from gguf import GGMLQuantizationType as Block

    from tests.support.gguf_files import write_gguf

    small = write_checkpoint(folder / "small")
    blocky = write_checkpoint(folder / "blocky", width=256, inner=256, size=64)  # blocks of 256 weights fit its rows
    kinds = {k: small for k in (Block.F32, Block.F16, Block.Q8_0, Block.Q4_0, Block.Q4_1)}
    kinds |= {k: blocky for k in (Block.Q4_K, Block.Q6_K)}
    goods = [write_gguf(folder / f"good-{k.name}.gguf", of, k).read_bytes() for k, of in kinds.items()]
    path = folder / "bad.gguf"

    def case(rng: Random) -> None:
        good = rng.choice(goods)
        metadata = 16384 if rng.random() < 0.8 else len(good)  # what says something lies in front
        path.write_bytes(mutate_bytes(rng, good[:metadata]) + good[metadata:])
        _open(path)

    return case


def _open(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    _load(checkpoint.tensors)
    _use(checkpoint.tokenizer)
    _ = checkpoint.chat_template, checkpoint.eos_token_ids


def config(folder: Path) -> Case:
    """config.json, generation_config.json, tokenizer_config.json; what a compressed folder says of its codes."""
    plain = write_checkpoint(folder / "good")
    write_compressed(folder / "compressed", plain, Kind(group=32, symmetric=False))
    names = ("config.json", "config.json", "generation_config.json", "tokenizer_config.json")
    files = [*(plain / name for name in names), *[folder / "compressed" / "config.json"] * 2]
    goods = {path: path.read_bytes() for path in files}

    def case(rng: Random) -> None:
        path = rng.choice(files)
        good = json.loads(goods[path])
        said = COMPRESSION if path.parent != plain and rng.random() < 0.9 else None
        try:
            bad = {**good, said: mutate_json(rng, good[said])} if said else mutate_json(rng, good)
            path.write_bytes(json_bytes(rng, bad))
            opened = Checkpoint.open(path.parent)
            _use(opened.tokenizer)
            _ = opened.chat_template, opened.eos_token_ids
            if path.name == "config.json":
                plan_engine(Source.from_checkpoint(opened), BuildOptions(max_batch=2, max_step_tokens=16))
        finally:
            path.write_bytes(goods[path])

    return case


def sentences(folder: Path) -> Case:
    """config.json of an encoder, the files of sentence-transformers, a WordPiece tokenizer."""
    checkpoint = write_encoder(folder / "good")
    names = ("config.json", *SENTENCES, "tokenizer.json", "tokenizer_config.json")
    goods = {name: (checkpoint / name).read_bytes() for name in names}

    def case(rng: Random) -> None:
        name = rng.choice(names)
        try:
            (checkpoint / name).write_bytes(json_bytes(rng, mutate_json(rng, json.loads(goods[name]))))
            opened = Checkpoint.open(checkpoint)
            opened.identity()
            _use(opened.tokenizer)
            if name == "config.json":
                plan_engine(Source.from_checkpoint(opened), BuildOptions(max_batch=2, max_step_tokens=16))
        finally:
            (checkpoint / name).write_bytes(goods[name])

    return case


def tokenizer(folder: Path) -> Case:
    """tokenizer.json of both kinds, tokenizer.model."""
    save_byte_level(folder / "bytes", 400)
    write_checkpoint(folder / "fallback")
    save_sentencepiece(folder / "pieces", 400)
    sources = [(folder / "bytes", "tokenizer.json"), (folder / "fallback", "tokenizer.json")] * 2
    sources += [(folder / "pieces", "tokenizer.model")]
    goods = {place: (place[0] / place[1]).read_bytes() for place in sources}

    def case(rng: Random) -> None:
        place = where, name = rng.choice(sources)
        good = goods[place]
        structured = name.endswith("json") and rng.random() < 0.8
        bad = json_bytes(rng, mutate_json(rng, json.loads(good))) if structured else mutate_bytes(rng, good)
        (where / name).write_bytes(bad)
        _use(open_tokenizer(where))

    return case


def program(folder: Path) -> Case:
    """program.bin, the manifest and the tactics, with checksums that are right: what lies behind them is tested."""
    source = Source.from_checkpoint(Checkpoint.open(write_checkpoint(folder / "checkpoint")))
    options = BuildOptions(precision=precision_map("w4a8", 32), max_batch=2, max_step_tokens=16)
    model = folder / "engine"
    write_engine(source, plan_engine(source, options), model, name="fuzz")
    sentences = encoder(folder / "encoder", "fp32").folder
    goods = {out: ((out / PROGRAM).read_bytes(), read_manifest(out)) for out in (model, sentences)}
    choices = [Choice(rows, {"tile_rows": 2, "task_panels": 1, "ahead": 64}, []) for rows in (1, 8)]
    table = TacticTable(fingerprint(usable_isas()[0]), 1, [TunedRegion("products", "matmul", [2, 7], choices)])

    def restore() -> None:
        for out, (steps, manifest) in goods.items():
            (out / PROGRAM).write_bytes(steps)
            (out / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        (model / TACTICS).unlink(missing_ok=True)

    def in_program(rng: Random, out: Path) -> None:
        steps, manifest = goods[out]
        bad = bytearray(steps)
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(len(bad) // 4) * 4
            value = rng.choice(
                [0, 1, 2, 3, 8, 64, 2**24, 2**31 - 1, 2**32 - 1, rng.randrange(2**12), rng.randrange(2**32)]
            )
            bad[at : at + 4] = struct.pack("<I", value)
        whole = bytes(bad) if rng.random() < 0.8 else mutate_bytes(rng, steps)
        (out / PROGRAM).write_bytes(whole)
        entry = FileEntry(len(whole), file_checksum(out / PROGRAM))
        files = {**manifest.files, PROGRAM: entry}
        (out / MANIFEST).write_bytes(msgspec.json.encode(sealed(msgspec.structs.replace(manifest, files=files))))

    def in_manifest(rng: Random, out: Path) -> None:
        _reseal(rng, out / MANIFEST, goods[out][1])

    def in_tactics(rng: Random, out: Path) -> None:
        _reseal(rng, out / TACTICS, write_tactics(out, table))

    runs = {model: _run, sentences: _run_network}
    ways: list[tuple[Callable[[Random, Path], None], Path]] = [
        (in_program, model), (in_program, model), (in_manifest, model), (in_tactics, model),
        (in_program, sentences), (in_manifest, sentences), (in_manifest, sentences),
    ]  # fmt: skip

    def case(rng: Random) -> None:
        break_it, out = rng.choice(ways)
        try:
            break_it(rng, out)
            runs[out](out)
        finally:
            restore()

    return case


def _reseal(rng: Random, path: Path, table: msgspec.Struct) -> None:
    """Something else in the table, with the right checksum where it is a table still."""
    bad = json_bytes(rng, mutate_json(rng, msgspec.to_builtins(table)))
    with suppress(*UNREADABLE):
        bad = msgspec.json.encode(sealed(msgspec.json.decode(bad, type=type(table))))
    path.write_bytes(bad)


def _run(folder: Path) -> None:
    executor = Engine.open(folder).executor(n_pages=4, threads=1)
    try:
        limits = executor.limits
        step = dummy_step([2, 1] if limits.max_sequences > 1 else [1], 0, 2, vocab=min(limits.vocab_size, 300))
        executor.run(step)
        executor.run(dummy_step([1], 3, 1, vocab=min(limits.vocab_size, 300)))
    except ExecutionError:
        pass  # limits that the step does not fit
    finally:
        executor.close()


def _run_network(folder: Path) -> None:
    engine = Engine.open(folder)
    given = packed(texts((5, 70, 1)))
    asked = {s.name: [3 if isinstance(d, str) else min(d, 100) for d in s.shape] for s in engine.manifest.cpu.inputs}
    loaded = engine.stateless_executor(threads=1)
    try:
        for _ in range(2):
            loaded.run({name: given.get(name, np.ones(shape, np.int32)) for name, shape in asked.items()})
    except ExecutionError:
        pass  # lengths that do not fit
    finally:
        loaded.close()


def requests(folder: Path) -> Case:
    """BodyLimiter of every endpoint that takes one, up to the point where an engine would be asked."""
    from tests.fuzz.request_bodies import BODIES, Endpoints

    endpoints = Endpoints()

    def case(rng: Random) -> None:
        kind, good = rng.choice(BODIES)
        endpoints.take(kind, json_bytes(rng, mutate_json(rng, good)))

    return case


TARGETS = {
    f.__name__: f"{f.__module__}:{f.__name__}"
    for f in (
        safetensors,
        gguf,
        config,
        sentences,
        tokenizer,
        program,
        gpu_engines,
        requests,
        pbtxt,
        tensors,
        structured,
    )
}
