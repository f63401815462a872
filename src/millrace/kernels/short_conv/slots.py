"""Where a step's sequences have their states on a device: what short_conv takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceSlots:
    """All i32 on the device; T tokens of S sequences, one behind the other.

    owner (T,): the sequence of each token | starts (S + 1,)
    before, behind (S,): its slot before this step, and behind it; before is -1 if the sequence begins with this step
    """

    owner: Tensor
    starts: Tensor
    before: Tensor
    behind: Tensor
