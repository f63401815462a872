"""Quantized folders: which format config.json describes, and their tensors."""

from pathlib import Path

from millrace.checkpoint.bitsandbytes.scheme import BitsAndBytes, is_bitsandbytes, read_bitsandbytes
from millrace.checkpoint.bitsandbytes.tensors import BitsAndBytesTensors
from millrace.checkpoint.compressed.fp8_configs import is_fp8, modelopt_config, read_fp8
from millrace.checkpoint.compressed.scheme import Compression, is_compressed, read_compression
from millrace.checkpoint.compressed.tensors import CompressedTensors
from millrace.checkpoint.gptq_awq.scheme import PackedScheme, is_packed, read_packed
from millrace.checkpoint.gptq_awq.tensors import PackedTensors
from millrace.checkpoint.weights.safetensors import Tensors

Quantization = Compression | PackedScheme | BitsAndBytes


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
    return read_fp8(raw) if is_fp8(raw) else None


def open_tensors(folder: Path, quantization: Quantization | None) -> Tensors:
    """Open the weights of a folder. raises CheckpointError"""
    if isinstance(quantization, Compression):
        return CompressedTensors.from_folder(folder, quantization)
    if isinstance(quantization, BitsAndBytes):
        return BitsAndBytesTensors.from_folder(folder, quantization)
    return PackedTensors.from_folder(folder, quantization) if quantization else Tensors.open(folder)
