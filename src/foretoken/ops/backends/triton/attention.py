"""Attention for models that run through their Transformers modules: that of `torch_cpu`, in torch.

Its operators run on any device.
"""

from foretoken.ops.backends.torch_cpu.attention import attention

__all__ = ["attention"]
