"""Attention for models that run through their Transformers modules: that of `torch`, in torch.

Its operators run on any device.
"""

from foretoken.ops.backends.torch.attention import attention

__all__ = ["attention"]
