"""Quantized folders: which format config.json describes, and their tensors."""

from pathlib import Path

from millrace.checkpoint.bitsandbytes.scheme import BitsAndBytes, is_bitsandbytes, read_bitsandbytes
from millrace.checkpoint.bitsandbytes.tensors import BitsAndBytesTensors
from millrace.checkpoint.compressed.fp8_configs import is_fp8, modelopt_config, read_fp8
from millrace.checkpoint.compressed.scheme import Compression, is_compressed, read_compression, unsupported
from millrace.checkpoint.compressed.tensors import CompressedTensors
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.gptq_awq.scheme import PackedScheme, is_packed, read_packed
from millrace.checkpoint.gptq_awq.tensors import PackedTensors
from millrace.checkpoint.mxfp4.scheme import Mxfp4, is_mxfp4, read_mxfp4
from millrace.checkpoint.mxfp4.tensors import StackedExpertTensors
from millrace.checkpoint.weights.safetensors import Tensors

Quantization = Compression | PackedScheme | BitsAndBytes | Mxfp4


def read_quantization(raw: object, folder: Path) -> Quantization | None:
    """Parse quantization_config. Return None if there is none, or its method is unknown. raises CheckpointError"""
    if raw is None:
        raw = modelopt_config(folder)
    if is_compressed(raw):
        return read_compression(raw)
    if is_packed(raw):
        return read_packed(raw)
    if is_bitsandbytes(raw):
        return read_bitsandbytes(raw)
    if is_mxfp4(raw):
        return read_mxfp4(raw)
    return read_fp8(raw) if is_fp8(raw) else None


def open_tensors(folder: Path, quantization: Quantization | None, config: ModelConfig | EncoderConfig) -> Tensors:
    """Open the weights of a folder. raises CheckpointError"""
    if isinstance(quantization, Mxfp4):
        if not (isinstance(config, ModelConfig) and config.family == "gpt_oss"):
            raise unsupported("quant_method", "mxfp4", "another one: only experts of GPT-OSS are read in this format")
        return StackedExpertTensors.from_folder(folder, config)
    if isinstance(quantization, Compression):
        return CompressedTensors.from_folder(folder, quantization)
    if isinstance(quantization, BitsAndBytes):
        return BitsAndBytesTensors.from_folder(folder, quantization)
    return PackedTensors.from_folder(folder, quantization) if quantization else Tensors.open(folder)
