"""What is measured: a prompt on its own, or tokens decoded for several users at once, as llama-bench defines them.

A sample is the seconds that the counted part took. Tokens are random ids, given; nothing is detokenised, and peers are
not charged for sampling (ours draws the token within its step).
"""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Workload:
    """`users` sequences of `prompt` tokens each; decode counts `new` further tokens of each, prefill the prompt."""

    phase: Phase
    users: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        size = self.prompt if self.phase is Phase.PREFILL else self.users
        return f"{self.phase}-{size}"

    @property
    def tokens(self) -> int:
        """Counted in one sample."""
        return self.users * (self.prompt if self.phase is Phase.PREFILL else self.new)

    @property
    def steps(self) -> int:
        """Passes over all weights in one sample of decode."""
        return self.new


WORKLOADS = {
    w.name: w
    for w in (
        Workload(Phase.PREFILL, users=1, prompt=512, new=0),
        Workload(Phase.DECODE, users=1, prompt=16, new=64),
        Workload(Phase.DECODE, users=4, prompt=128, new=32),
        Workload(Phase.DECODE, users=16, prompt=128, new=32),
        Workload(Phase.PREFILL, users=1, prompt=4096, new=0),
    )
}
CHECKED = tuple(7 + 389 * i % 30_000 for i in range(64))  # a prompt: token ids that every model here has
CONTEXT = 4096 + 64  # what engines that plan their memory are planned for
MAX_USERS = 16
