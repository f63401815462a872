"""The trained model as a folder that transformers (and Millrace) open: bfloat16 weights, config, tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.tiny.model import TinyLlama
from tools.tiny.tokenizer import PAD, save_tokenizer, token_id
from tools.tiny.world import BOS, END, EOS


def export(model: TinyLlama, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the folder; files already there are replaced one by one, each whole."""
    aside = folder.with_name(folder.name + ".part")
    save_tokenizer(tokenizer, aside, model.cfg.context)
    config = model.cfg.to_hf(
        bos=token_id(tokenizer, BOS),
        eos=[token_id(tokenizer, END), token_id(tokenizer, EOS)],
        pad=token_id(tokenizer, PAD),
        dtype=str(dtype).removeprefix("torch."),
    )
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, str(aside / "model.safetensors"), metadata={"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    for file in aside.iterdir():
        file.chmod(0o644)  # safetensors writes for its owner alone
        file.replace(folder / file.name)
    shutil.rmtree(aside)
