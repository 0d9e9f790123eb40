"""Numbers of the host on their way to a device.

A copy from ordinary memory may wait for all that was launched before it: the host would then not
run ahead. From pinned memory it never does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The array as a tensor there, behind what was launched; on a CPU it shares its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
