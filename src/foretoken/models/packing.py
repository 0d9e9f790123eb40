"""Linear layers in oneDNN's packed weight layout: for float32 on a CPU.

Belongs here: replacing `nn.Linear` inside a loaded module. The self-check runs afterwards, against
logits computed before.

Why (20 layers x 256 hidden, V 4096, all linears of a forward, 2 threads, AMD EPYC with AVX-512;
stock MKL against packed, ms): 1 row 4.3 / 2.7, 5 rows 5.0 / 2.9, 64 rows 29 / 6.3. And a row's
result no longer depends on how many rows are computed with it (bit for bit, 1 to 8 rows), which is
what keeps greedy text equal with and without speculation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack", "pack_linears"]

# The row count the packed layout is tuned for. Chosen once for all row counts: with 1, single rows
# take another kernel, slower (3.5 ms instead of 2.7) and with other rounding than several rows.
_ROWS_HINT = 64


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` whose weight is packed for oneDNN; called with [..., in] float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        ops: Any = torch.ops.mkldnn
        # Not a buffer: opaque tensors have no storage to move or save.
        self._packed = ops._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self.bias = linear.bias
        self._op = ops._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = self._op(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of PyTorch packs linear layers for this dtype and device."""
    return (
        device.type == "cpu"
        and dtype is torch.float32
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack_linears(module: nn.Module) -> None:
    """Replace every plain `nn.Linear` in place. Weights shared with an embedding stay there too."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
