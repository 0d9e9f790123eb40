"""Attention of models that run through their Transformers modules: that of `torch`.

Models that the native decoder runs attend inside it (`csrc/attention.cpp`).
"""

from foretoken.ops.backends.torch.attention import attention

__all__ = ["attention"]
