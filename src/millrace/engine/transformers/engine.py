"""A checkpoint that runs through transformers in PyTorch. Nothing is built; the manifest is of this start alone."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import millrace
from millrace.checkpoint.checkpoint import CONFIG, with_tokenizers_own
from millrace.checkpoint.config.generation_config import GENERATION_CONFIG
from millrace.checkpoint.tokenizer.tokenizer import (
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    read_files,
    read_json_object,
)
from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.engine.artifact.accuracy_loss import Evaluation
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.folder_lock import FolderLock
from millrace.engine.artifact.manifest import FORMAT, CpuSection, FileEntry, Manifest, SlotEntry, SymbolEntry
from millrace.engine.cache_specs import PAGE_TOKENS, SLOTS_PER_SEQUENCE
from millrace.engine.executor import Executor, ExecutorLimits
from millrace.errors import CheckpointError, ConfigError, sanitize
from millrace.graph.rewrite import LOGITS
from millrace.graph.types import DType

WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
MAX_BATCH, MAX_STEP_TOKENS = 8, 512
MAX_CONTEXT = 8192  # unless a longer one is asked for
log = logging.getLogger(__name__)
INSTALL = "pip install 'millrace[torch]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine(Engine):
    """config: of transformers. kv_bytes_per_token: of all layers, at most"""

    config: Any
    kv_bytes_per_token: int

    @property
    def windows(self) -> tuple[int, ...]:
        return ()

    def window_page_bytes(self, window: int) -> int:
        return self.kv_bytes_per_token * PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        return self.kv_bytes_per_token * PAGE_TOKENS

    @property
    def n_slots(self) -> int:
        return SLOTS_PER_SEQUENCE * self.manifest.max_sequences

    @property
    def states_bytes(self) -> int:
        return 0  # the slots only tell sequences apart

    def load(self, n_pages: int, threads: int) -> Executor:
        """Load the weights. raises CheckpointError"""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from millrace.engine.transformers.executor import TransformersExecutor

        m = self.manifest
        dtype = torch.bfloat16 if m.precision["default"] == "bf16" else torch.float32
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                self.folder, config=self.config, dtype=dtype, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise _refused(self.folder, "cannot load it", error) from error
        finally:
            if shows_progress:
                logging.enable_progress_bar()
        self._check_loaded(info)
        limits = ExecutorLimits(
            max_step_tokens=m.max_step_tokens, max_sequences=m.max_sequences, max_rows=m.max_sequences,
            max_context=m.max_context, page_tokens=PAGE_TOKENS, n_pages=n_pages, vocab_size=m.vocab_size,
            n_slots=self.n_slots,
        )  # fmt: skip
        return TransformersExecutor(model.eval(), limits, threads)

    def _check_loaded(self, info: Mapping[str, Any]) -> None:
        """Refuse a model some of whose weights transformers has drawn at random. raises CheckpointError"""
        if missing := sorted(info["missing_keys"]):
            n = len(missing)
            raise CheckpointError(
                f"{self.folder}: {n} tensor{'s are' if n > 1 else ' is'} missing: {', '.join(missing[:3])}",
                "all weights of the model that config.json describes",
                "fetch the checkpoint again, or fix config.json",
            )  # fmt: skip
        for name in sorted(info["unexpected_keys"])[:3]:
            log.warning("%s: transformers does not use the tensor %s", self.folder, sanitize(name))


def transformers_engine(
    name: str, folder: Path, tensors: Tensors, source: str, *, precision: str | None = None,
    max_context: int | None = None, max_batch: int | None = None,
) -> TransformersEngine:  # fmt: skip
    """Read a checkpoint's configuration with transformers; no code of the checkpoint runs, and no weight is read.

    source: identity of the checkpoint. precision: fp32 or bf16; None: bf16 if all tensors are stored so, else fp32
    raises CheckpointError for a checkpoint that transformers cannot run, ConfigError for settings that it has not
    """
    if precision not in (None, *WEIGHT_BYTES):
        raise ConfigError(
            f"--precision {precision} is given for a model that runs through transformers", "fp32 or bf16",
            "leave it out, or name one of them",
        )  # fmt: skip
    config = _read_config(folder)
    text = config.get_text_config(decoder=True)
    n_parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    is_bf16 = all(tensor.dtype == "bfloat16" for tensor in tensors.values())  # float16 would lose bits as bfloat16
    chosen = precision or ("bf16" if is_bf16 else "fp32")
    context = _context(text, max_context)
    batch = max_batch or MAX_BATCH
    weights_bytes = n_parameters * WEIGHT_BYTES[chosen]
    logits = SlotEntry(LOGITS, ["R", int(text.vocab_size)], DType.F32, None)
    manifest = Manifest(
        format=FORMAT, millrace=millrace.__version__, model_name=sanitize(name),
        architecture=_architecture(config), source=source, precision={"default": chosen}, group=1,
        n_parameters=n_parameters,
        symbols=[SymbolEntry(s, 1, most, most) for s, most in (("T", MAX_STEP_TOKENS), ("S", batch), ("R", batch))],
        max_context=context, vocab_size=int(text.vocab_size),
        eos_token_ids=list(_eos_token_ids(folder, text)),
        bos_token_id=getattr(text, "bos_token_id", None), files={CONFIG: FileEntry(tensors.nbytes, source)},
        notes=[SLOW], evaluation=Evaluation("it runs as stored, or as fp32"),
        cpu=CpuSection(
            n_calls=0, weights_bytes=weights_bytes,
            activation_bytes=MAX_STEP_TOKENS * 4 * (4 * _largest_width(text) + int(text.vocab_size) // 8),
            activation_lower_bound=0, inputs=[], outputs=[logits], caches=[],
        ),
    )  # fmt: skip
    lock = FolderLock(os.open(folder / CONFIG, os.O_RDONLY | os.O_CLOEXEC))
    return TransformersEngine(
        folder, manifest, lock, config=config, kv_bytes_per_token=_kv_numbers(text) * WEIGHT_BYTES[chosen]
    )


def _eos_token_ids(folder: Path, text: Any) -> tuple[int, ...]:
    """Return the ids that end a text, as of a native engine. text: the decoder's configuration"""
    eos: Any = read_json_object(folder / GENERATION_CONFIG).get("eos_token_id")
    if eos is None:
        eos = getattr(text, "eos_token_id", None)
    result = (eos,) if isinstance(eos, int) else tuple(int(token) for token in eos or ())
    files = read_files(folder, TOKENIZER_FILES)
    if TOKENIZER_JSON not in files and TOKENIZER_MODEL not in files:
        return result
    return with_tokenizers_own(result, make_tokenizer(files, folder, int(text.vocab_size)))


SLOW = (
    "this model runs through transformers in PyTorch, one sequence after the other: it is slow, and its answers may "
    "depend on how a prompt was divided into chunks"
)


def _read_config(folder: Path) -> Any:
    """raises CheckpointError, ConfigError"""
    try:
        import torch  # noqa: F401  transformers imports without it, and fails later
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ConfigError(
            f"transformers cannot be used: {error}", "PyTorch and transformers", f"install them: {INSTALL}"
        ) from error
    raw = read_json_object(folder / CONFIG)
    causal_types = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if "auto_map" in raw and raw.get("model_type") not in causal_types:
        raise CheckpointError(
            f"{folder} needs code of its own ({raw['auto_map']})"[:300], "a model that transformers itself has",
            "choose another checkpoint: code that comes with one is never run",
        )  # fmt: skip
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(folder, "cannot read its config.json", error) from error
    if config.model_type not in causal_types:
        raise CheckpointError(
            f"{folder}: transformers has no causal language model of type {config.model_type!r}",
            "a model that generates text token by token", "choose another checkpoint",
        )  # fmt: skip
    return config


def _refused(folder: Path, what: str, error: Exception) -> CheckpointError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
        f"{folder}: transformers {what}: {sanitize(reason[0])[:300]}", "a complete checkpoint of safetensors files",
        "check the files, or update transformers",
    )  # fmt: skip


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None) or [config.model_type]
    return sanitize(str(names[0]))


def _context(text: Any, requested: int | None) -> int:
    """Return the context: the model's own, at most MAX_CONTEXT, or what is asked for. raises ConfigError"""
    own = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    own = own if isinstance(own, int) and own > 0 else None  # XLNet has -1: no limit
    if requested is not None and own is not None and requested > own:
        raise ConfigError(f"--max-context is {requested}", f"at most the model's {own}", "lower it")
    return int(requested or min(own or MAX_CONTEXT, MAX_CONTEXT))


def _largest_width(text: Any) -> int:
    widths = (getattr(text, name, None) for name in ("hidden_size", "intermediate_size", "n_embd"))
    return max((w for w in widths if isinstance(w, int)), default=4096)


def _kv_numbers(text: Any) -> int:
    """Numbers of keys and values per token, at most: as if every layer had full attention."""
    n_layers = getattr(text, "num_hidden_layers", None)
    if n_layers is None:
        return _layer_kv_numbers(text)
    by_layer = getattr(text, "per_layer_config", None)  # layers may differ, since transformers 5.20
    layers = [text if by_layer is None else by_layer[i] for i in range(int(n_layers))]
    return sum(map(_layer_kv_numbers, layers))


def _layer_kv_numbers(layer: Any) -> int:
    heads = int(getattr(layer, "num_attention_heads", 0) or 1)
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    head_size = getattr(layer, "head_dim", None) or (getattr(layer, "hidden_size", None) or 4096) // heads
    return 2 * int(max(kv_heads) if isinstance(kv_heads, list | tuple) else kv_heads) * int(head_size)
