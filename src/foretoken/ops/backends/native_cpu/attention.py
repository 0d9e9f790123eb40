"""Attention of models that run through their Transformers modules: that of `torch_cpu`.

Models that the native decoder runs attend inside it (`native/csrc/attention.cpp`).
"""

from foretoken.ops.backends.torch_cpu.attention import attention

__all__ = ["attention"]
