"""Settings of a running model. This module imports little, because `--help` needs it."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.engine.cuda.device_lookup import CPU, DeviceId, check_name
from millrace.errors import ConfigError
from millrace.settings import Settings, flag_of, setting

MAX_QUEUED = 256  # sequences waiting for their first step
NATIVE, TRANSFORMERS = IMPLEMENTATIONS = "native", "transformers"
SCHEDULES = ("fcfs", "shortest", "prefix")  # the names of the policies in admission_policy.py


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """How a built engine runs on this machine."""

    title: ClassVar = "Engine"

    kv_memory: int | None = setting(
        None,
        "memory for KV pages, such as 2G; default: a full context for each sequence, or 60 % of the free memory",
        size=True,
        low=1,
    )
    threads: int | None = setting(
        None, "compute threads; default: the cores that this process may use", low=1, high=1024
    )
    prefix_cache: bool = setting(True, "reuse KV pages of equal prompt prefixes")
    kv_tier: str | None = setting(
        None,
        "file for KV pages evicted from memory (KV offload); survives restarts; default: off",
        metavar="FILE",
    )
    kv_tier_size: int | None = setting(None, "maximum size of the --kv-tier file; default: 4G", size=True, low=1)
    isa: str | None = setting(
        None, "force an instruction set: amx, avx512, avx2 or scalar", choices=("amx", "avx512", "avx2", "scalar")
    )
    model_impl: str = setting(
        NATIVE,
        "implementation: native, or transformers: any causal language model of Hugging Face, in PyTorch, slowly",
        choices=IMPLEMENTATIONS,
    )
    device: str = setting(CPU, "where it runs: cpu, or an NVIDIA GPU: cuda, or cuda:1 for the second", metavar="NAME")
    random_weights: bool = setting(
        False, "on a GPU: use random weights, to measure a model of which only config.json and the tokenizer exist; "
        "its output is meaningless",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.device)
        of_cpus = {"threads": self.threads, "isa": self.isa, "kv_tier": self.kv_tier}
        if self.device != CPU and (cpu_only := [name for name, value in of_cpus.items() if value is not None]):
            what = f"{flag_of(cpu_only[0])} is given, and --device is {self.device}"
            raise ConfigError(what, "nothing: that is for a CPU", "leave one of them out")
        if self.random_weights and self.device == CPU:
            raise ConfigError("--random-weights is given for a CPU", "--device cuda", "add it, or leave this out")
        if self.kv_tier_size is not None and self.kv_tier is None:
            what = "--kv-tier-size is given, and --kv-tier is not: there is no KV offload file"
            raise ConfigError(what, "a file for --kv-tier, too", "name it with --kv-tier, or leave --kv-tier-size out")

        if self.is_transformers:
            changed = {"isa": self.isa is not None, "kv_tier": self.kv_tier is not None, "device": self.device != CPU}
            if native_only := [name for name, is_changed in changed.items() if is_changed]:
                what = f"{flag_of(native_only[0])} is given, and --model-impl is {TRANSFORMERS}"
                raise ConfigError(what, "a model that runs natively", "leave one of them out")

    @property
    def is_transformers(self) -> bool:
        return self.model_impl == TRANSFORMERS

    @property
    def place(self) -> DeviceId:
        return DeviceId(self.device, self.random_weights, self.is_transformers)
