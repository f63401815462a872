"""`doctor --device` and `build --device`: what a GPU has, by the one table, and an engine that is built for one."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.builder import Builder
from millrace.compile.lower_gpu.precision_check import check_gpu_has
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.cuda import device_lookup, device_roofline
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.cuda.device_roofline import DeviceRates
from millrace.errors import ConfigError, MachineError
from millrace.kernels.precision import Precision
from millrace.machine.devices import Device
from tests.cli.conftest import Millrace
from tests.machine.test_devices import OURS, TENSOR_CORES
from tests.support.checkpoints import random_checkpoint

# What meets in the products of each precision: weights become what their rows are, and int8 rows meet integers.
NEEDED = {
    "precision tf32": set(), "precision fp16": {"fp16"}, "precision fp8": {"bf16", "fp8"}, "precision fp32": set(),
    "precision bf16": {"bf16"}, "precision w8a8": {"bf16", "int8"}, "precision w8a16": {"bf16"},
    "precision w4a8": {"bf16", "int8"}, "precision w4a16": {"bf16"}, "precision fp8a16": {"bf16", "fp8"},
    "kv-cache-dtype int8": set(), "kv-cache-dtype fp8": {"fp8"},
}  # fmt: skip
WITHOUT_KERNELS = {"Volta", "Turing"}


@pytest.mark.parametrize("device", OURS, ids=lambda device: device.name)
def test_doctor_tells_what_the_table_has(device: Device, millrace: Millrace) -> None:
    told = json.loads(millrace("doctor", "--device", device.name.replace(" ", "-").lower(), "--json").out)
    has = TENSOR_CORES[device.architecture]
    assert told["device"] == f"{device.name} ({device.architecture})" and set(told["multiplies"]) == has
    assert told["asked"].keys() == NEEDED.keys()
    for asked, needed in NEEDED.items():
        one = told["asked"][asked]
        assert set(one["multiplies"]) == needed
        assert (one["why_not"] is None) == (device.architecture not in WITHOUT_KERNELS and needed <= has), asked


def test_doctor_on_a_screen(millrace: Millrace) -> None:
    done = millrace("doctor", "--device", "a100")
    rows = {line.split("  ")[1].strip(): line.split()[-1] for line in done.out.splitlines() if line.startswith("  --")}
    assert rows["--precision fp8a16"] == rows["--kv-cache-dtype fp8"] == "refused"
    assert rows["--precision w4a8"] == rows["--precision fp32"] == "yes"
    assert "--kv-cache-dtype int8  what layers do  yes" in done.out
    assert done.err.count("A100 SXM 80GB (Ampere) does not multiply fp8; it has fp16, bf16, int8") == 1
    for name, words in (("MI300X", "no kernel for GPUs here runs on MI300X (CDNA3)"), ("T4", "runs on T4 (Turing)"),
                        ("EPYC 9654", "no kernel for GPUs here runs on EPYC 9654 (Zen 4)")):  # fmt: skip
        done = millrace("doctor", "--device", name)
        assert words in done.err and "yes" not in done.out
    assert "nothing" not in millrace("doctor", "--device", "L4").out
    millrace("doctor", "--device", "H10").assert_mistake('--device is "H10"', "cuda:1", "H100")
    millrace("doctor", "--device", "L4", "--isa", "avx2").assert_mistake("--isa beside --device L4")


def test_doctor_of_a_gpu_that_is_here(millrace: Millrace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are a CPU's, so that its rates are measured, and mean nothing."""
    monkeypatch.setattr(device_lookup, "find_gpu", lambda device: Gpu("cpu", "NVIDIA A10", (8, 6), 1 << 30, 72))
    told = json.loads(millrace("doctor", "--device", "cuda:1", "--json").out)
    assert told["device"] == "NVIDIA A10 (Ampere, sm_86)" and told["asked"]["precision fp8a16"]["why_not"]
    assert told["measured"]["products"].keys() == {"fp32", "fp16", "bf16", "int8"}
    assert min(told["measured"]["read"], told["measured"]["copied"], *told["measured"]["products"].values()) > 0
    assert (told["free_bytes"], told["multiprocessors"]) == (1 << 30, 72)
    monkeypatch.setattr(device_lookup, "find_gpu", none_here)
    millrace("doctor", "--device", "cuda").assert_mistake("no GPU to run on")


@pytest.mark.parametrize(
    "name, share",
    [("NVIDIA H100 80GB HBM3", 1), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 3 / 7), ("NVIDIA H200", 1), ("A GPU", None)],
)
def test_rates_stand_beside_the_datasheet(
    name: str, share: float | None, millrace: Millrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice has its share of the products, and half of the memory's rate."""
    monkeypatch.setattr(device_lookup, "find_gpu", lambda device: Gpu("cpu", name, (9, 0), 1 << 30, 60))
    seen = DeviceRates(1675e9, 3350e9, {"fp32": 50e12, "fp8": 1979e12 / 2})
    monkeypatch.setattr(device_roofline, "measured", lambda gpu, precisions: seen)
    lines = millrace("doctor", "--device", "cuda").out.splitlines()
    shown = {line.split("  ")[1].strip(): line.split() for line in lines if line.startswith("  ")}
    assert shown["reading memory"][2:4] == ["1,675", "GB"]
    fp8 = shown["products in fp8"]
    assert fp8[3:6] == ["989.5", "T", "operations"] and fp8[6:] == ([] if share is None else [f"{0.5 / share:.0%}"])
    assert "%" not in " ".join(shown["products in fp32"])
    assert shown["multiprocessors"][1:] == ["60"] and shown["free memory"][2:] == ["1", "GiB"]


@pytest.mark.parametrize("failing", [None, RuntimeError("CUDA error: unspecified launch failure")])
def test_a_gpu_that_cannot_be_measured(failing: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("cpu" if failing else "cuda:0", "NVIDIA A10", (8, 6), 100 << 20, 72)
    monkeypatch.setattr(
        device_roofline, "_rates", lambda *_: (_ for _ in ()).throw(failing or AssertionError("it is too small"))
    )
    with pytest.raises(MachineError) as refused:
        device_roofline.measured(gpu, ())
    assert ("unspecified launch failure" if failing else "NVIDIA A10 has 100 MiB free") in refused.value.what


def none_here(device: str) -> Gpu:
    raise MachineError(f"--device {device}: no GPU to run on", "one", "run on the CPU")


@pytest.mark.parametrize("precision", [*Precision, "fp16", "tf32", "fp8"])
@pytest.mark.parametrize("device", OURS, ids=lambda device: device.name)
def test_a_build_is_refused_by_the_table(device: Device, precision: str) -> None:
    """Before anything is built; of a device that has it nothing is said."""
    without = device.architecture in WITHOUT_KERNELS
    lacking = NEEDED[f"precision {precision}"] - TENSOR_CORES[device.architecture]
    refused = pytest.raises(ConfigError) if without or lacking else nullcontext()
    with refused as error:
        check_gpu_has(device.name, BUNDLED / "tiny", BuildSettings(precision=precision))
    if error is not None:
        about = f"{device.name} ({device.architecture})"
        lacks = f"{about} does not multiply {', '.join(lacking)}; it has"
        assert error.value.what.startswith(f"no kernel for GPUs here runs on {about}" if without else lacks)


@pytest.mark.parametrize(("flags", "seconds"), [((), 0), (("--tune-rows", "1/16"), 2), (("--tune", "1"), 1)])
def test_kernels_of_a_cpu_are_timed_where_that_is_asked(
    flags: tuple[str, ...], seconds: float, millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_settings(name: str, checkpoint: Checkpoint, settings: BuildSettings, *_: Any, **__: Any) -> Builder:
        raise ConfigError(f"{settings.tune:g} seconds", "", "")

    monkeypatch.setattr(Builder, "from_settings", from_settings)
    done = millrace("build", "tiny", "-o", tmp_path / "e", "--device", "H100", *flags)
    done.assert_mistake(f"error: {seconds} seconds")


def test_layers_that_no_gpu_kernel_computes(tmp_path: Path, millrace: Millrace) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", "mixtral")
    result = millrace("build", folder, "-o", tmp_path / "e", "--device", "H100")
    assert result.code and "mixtures of experts of this model on a GPU" in result.err
    assert not (tmp_path / "e").exists()


def test_build_for_a_gpu(millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = ("build", "tiny", "-o", tmp_path / "e")
    fp8 = ("--kv-cache-dtype", "fp8")
    millrace(*build, "--device", "A100", *fp8).assert_mistake("A100 SXM 80GB (Ampere) does not multiply fp8")
    (tmp_path / "map.json").write_text('{"default": "bf16", "layers.1.*": "fp8a16"}')
    mapped = ("--precision-map", tmp_path / "map.json")
    millrace(*build, "--device", "A100", *mapped).assert_mistake("A100 SXM 80GB (Ampere) does not multiply fp8")
    monkeypatch.setattr(device_lookup, "find_gpu", none_here)
    millrace(*build, "--device", "cuda").assert_mistake("no GPU to run on")
    monkeypatch.setattr(device_lookup, "find_gpu", lambda device: Gpu(device, "NVIDIA A100", (8, 0), 1 << 30, 108))
    millrace(*build, "--device", "cuda", "--precision", "fp8a16").assert_mistake("NVIDIA A100 (Ampere, sm_80) does not")
    millrace(*build, "--device", "H10").assert_mistake('--device is "H10"')
    millrace(*build, "--precision", "fp8").assert_mistake("use fp8a16", "--device")
    for kept, also in (("int4", ()), ("fp32", ("--precision", "bf16")), ("bf16", ("--precision", "fp16"))):
        millrace(*build, "--device", "H100", "--kv-cache-dtype", kept, *also).assert_mistake(f"values in {kept} o")
    (tmp_path / "traffic.jsonl").write_text("")
    millrace(*build, "--device", "L4", "--traffic", tmp_path / "traffic.jsonl").assert_mistake("--traffic is given")
    assert not (tmp_path / "e").exists()
    done = millrace(*build, "--device", "h100", "--precision", "fp8", "--no-evaluate")
    assert done.code == 0
    assert re.search("fp8a16, lm_head w8a16 g128(, bf16 summed by tiles)?, on a GPU fp8", done.out), done.out
    assert json.loads(millrace("inspect", tmp_path / "e", "--json").out)["precision_on_gpu"] == "fp8"
    assert "never tuned" in done.out and f"millrace serve {tmp_path / 'e'} --device cuda" in done.out
    manifest = Engine.open(tmp_path / "e").manifest
    assert manifest.gpu.precision == "fp8" and len(manifest.gpu.fp8_rows) == 5 * 7
    assert millrace("generate", tmp_path / "e", "-p", "Once", "--max-tokens", "2").code == 0, "a CPU runs it too"
