"""Resolve MODEL, the argument of every command and of `LLM`.

It is a folder (engine or checkpoint), a GGUF file, a hub id, or a cached name.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.checkpoint.checkpoint import CONFIG, Checkpoint
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.checkpoint.tokenizer.tokenizer_files import no_tokenizer
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.compile.cache.engine_cache import CacheEntry, EngineCache
from millrace.compile.cache.file_digests import checkpoint_identity, folder_identity
from millrace.compile.settings import BuildSettings, Progress, Say
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import MANIFEST, read_manifest
from millrace.engine.cuda.device_lookup import CPU, ON_CPU, DeviceId, Gpu, find_gpu
from millrace.env import Env
from millrace.errors import CheckpointError, ConfigError, EngineError, nearest
from millrace.settings import flag_of

if TYPE_CHECKING:
    from millrace.compile.precision_selection import SelectorFactory

BUNDLED = Path(__file__).parent.parent / "bundled"


def model_folder(
    model: str, env: Env, progress: Progress | None = None, torch_weights: bool = False
) -> tuple[str, Path]:  # fmt: skip
    """Return a short name and the local folder or GGUF file of MODEL, downloaded if it is a hub id.

    torch_weights: download weights of PyTorch instead of safetensors
    raises CheckpointError, HubError
    """
    if not model:
        raise ConfigError("MODEL is empty", "a folder, a GGUF file, a hub id or `tiny`", "name one")
    bundled = BUNDLED / model
    if model.isidentifier() and bundled.is_dir():
        return model, bundled
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if is_gguf(path):
        return path.stem, path
    if "/" not in model and not path.exists():  # neither a path nor a hub id
        return _cached(model, env)
    from millrace.checkpoint.hub import resolve

    def downloading(done: int, total: int) -> None:
        if progress:
            progress(f"downloading {model}", done, total)

    folder = resolve(
        model, hf_home=env.hf_home, token=env.hf_token, offline=env.hf_offline, progress=downloading,
        torch_weights=torch_weights,
    )  # fmt: skip
    return model.split("@")[0].split("/")[-1], folder


def _cached(model: str, env: Env) -> tuple[str, Path]:
    """Find an engine by a name that `millrace list` shows. raises CheckpointError; ConfigError if several match"""
    cache = EngineCache(env.cache)
    if entry := cache.only(model):
        return entry.model, entry.folder
    models = {folder.name for folder in BUNDLED.iterdir() if folder.is_dir()} | {e.model for e in cache.entries()}
    near = nearest(model, cache.names() | models, models)
    raise CheckpointError(
        f'there is no model "{model}"', f"a folder, a GGUF file, a hub id org/name, or {near}",
        "check the spelling",
    )  # fmt: skip


def find_engine(
    model: str | tuple[str, Path], build: BuildSettings, env: Env, *, progress: Progress | None = None,
    say: Say | None = None, precisions: Mapping[str, str] | None = None, new_selector: "SelectorFactory | None" = None,
    place: DeviceId = ON_CPU,
) -> tuple[str, Engine]:  # fmt: skip
    """Return MODEL's engine: the folder itself if it is one, otherwise from the cache, or built now. For a GPU, make it
    anew.

    model: or its name and its folder, if the folder's name is not the model's
    precisions: a map by layer patterns, in place of `build.precision`; new_selector: measures accuracy losses
    """
    gpu = None if place.device == CPU else find_gpu(place.device)
    name, folder = model_folder(model, env, progress) if isinstance(model, str) else model
    if place.transformers:
        return _through_transformers(name, folder, build, env, progress, say)
    if gpu is not None:
        if (folder / MANIFEST).is_file():
            return _built_on_gpu(folder, build, gpu, env, say, place)
        from millrace.compile.lower_gpu.from_checkpoint import engine_from_checkpoint

        checkpoint = Checkpoint.without_weights(folder) if place.random_weights else Checkpoint.open(folder)
        return name, engine_from_checkpoint(name, checkpoint, build, gpu, env.cache, precisions, progress, say)
    if (folder / MANIFEST).is_file():
        engine = Engine.open(folder)
        _refuse_build_settings(build, folder)
        _report_accuracy_loss(engine, say)
        return engine.manifest.model_name, engine
    checkpoint = Checkpoint.open(folder)
    if not checkpoint.has_tokenizer:
        raise no_tokenizer(folder)
    from millrace.compile.builder import Builder  # imports the compiler, which a built engine does not need

    builder = Builder.from_settings(name, checkpoint, build, env.cache, precisions, progress, new_selector)
    with EngineCache(env.cache).get_or_build(name, builder.key, builder.write) as (result, fresh):
        engine = Engine.open(result)
    if say and fresh:  # later runs would only repeat it; `millrace inspect` shows it again
        for note in engine.manifest.notes:
            say(note)
    _report_accuracy_loss(engine, say)
    if say and not fresh and build.tune not in (0, BuildSettings.tune):
        say(f"this engine is there already, and is not timed again: millrace tune {engine.folder}")
    return name, engine


def _built_on_gpu(
    folder: Path, build: BuildSettings, gpu: Gpu, env: Env, say: Say | None, place: DeviceId
) -> tuple[str, Engine]:  # fmt: skip
    from millrace.compile.lower_gpu.from_engine import RUNTIME_OVERRIDES, engine_from_folder

    _refuse_build_settings(build, folder, RUNTIME_OVERRIDES)
    if place.random_weights:
        raise ConfigError(
            f"--random-weights is given, but {folder} is already built", "a checkpoint", "leave it out: it has weights"
        )
    engine = engine_from_folder(Engine.open(folder), build, gpu, env.cache, say)
    return engine.manifest.model_name, engine


def _through_transformers(
    name: str, folder: Path, build: BuildSettings, env: Env, progress: Progress | None, say: Say | None
) -> tuple[str, Engine]:
    if (folder / MANIFEST).is_file() or is_gguf(folder):
        raise ConfigError(
            f"--model-impl transformers is given for {folder}", "a checkpoint in Hugging Face's format",
            "leave it out, or name the checkpoint's folder",
        )  # fmt: skip
    if other := [field for field in build.changed_fields if field not in ("precision", "max_context", "max_batch")]:
        raise ConfigError(
            f"{flag_of(other[0])} is given, and --model-impl is transformers", "nothing: no engine is built",
            "leave it out",
        )  # fmt: skip
    from millrace.engine.transformers.engine import transformers_engine

    tensors = Tensors.open(folder)
    source = folder_identity(folder, tensors, env.cache, progress)
    engine = transformers_engine(
        name,
        folder,
        tensors,
        source,
        precision=build.precision,
        max_context=build.max_context,
        max_batch=build.max_batch,
    )
    if say:
        for note in engine.manifest.notes:
            say(note)
    return name, engine


def _report_accuracy_loss(engine: Engine, say: Say | None) -> None:
    """Report the accuracy loss at every start: the user may not be the builder."""
    if say and engine.manifest.evaluation.chosen_loss is not None:
        say(engine.manifest.evaluation.summary)


def _refuse_build_settings(build: BuildSettings, folder: Path, open_: Collection[str] = ()) -> None:
    """Refuse flags that cannot change a built engine, instead of ignoring them. open_: flags that may still be set"""
    if unusable := [name for name in build.changed_fields if name not in open_]:
        name = unusable[0]
        flag = flag_of(f"no_{name}" if getattr(build, name) is False else name)
        raise ConfigError(
            f"{flag} is given, but {folder} is already built", "a checkpoint, where this is still open",
            "leave it out, or build the checkpoint again with it",
        )  # fmt: skip


def find_built(name: str, env: Env, progress: Progress | None = None) -> Path:
    """Return the folder, or the most recently used cached engine of this name or of this model.

    A checkpoint's engines are those of equal content, whatever their names. raises EngineError
    """
    path, entries = Path(name).expanduser(), EngineCache(env.cache).entries()
    if (path / MANIFEST).is_file():
        return path
    is_checkpoint = (path / CONFIG).is_file() or is_gguf(path)
    if is_checkpoint:
        content = checkpoint_identity(Checkpoint.open(path), env.cache, progress)
        result = [e.folder for e in entries if _source(e) == content]
    else:
        result = [e.folder for e in entries if name in (e.name, e.model)]
    if result:
        return result[0]
    if is_checkpoint:
        raise EngineError(
            f"the cache has no engine of {path}", "a model that was built",
            f"build it: millrace build {name} -o ENGINE, or: millrace serve {name}",
        )  # fmt: skip
    if path.is_dir():
        raise EngineError(f"{path} has no {MANIFEST}", "an engine folder", f"build it: millrace build {name} -o ENGINE")
    valid_names = {names for e in entries for names in (e.name, e.model)}
    raise EngineError(
        f'there is no engine folder and no cached engine "{name}"',
        nearest(name, valid_names) if valid_names else "an engine folder; the cache is empty",
        "check the spelling, or build it: millrace build MODEL -o ENGINE",
    )


def _source(entry: CacheEntry) -> str | None:
    """Return what a cached engine was built from; None if it is unreadable."""
    try:
        return read_manifest(entry.folder).source
    except (EngineError, OSError):
        return None
