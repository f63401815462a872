"""The state slots of a step's sequences on a device, read by short_conv."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceSlots:
    """State slots of T tokens of S sequences, packed; i32 on the device.

    owner (T,): the sequence of each token | starts (S + 1,)
    before, behind (S,): the slots before and after this step; before is -1 if the sequence starts in this step
    """

    owner: Tensor
    starts: Tensor
    before: Tensor
    behind: Tensor
