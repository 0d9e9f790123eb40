"""Attention for models that run through their Transformers modules: that of `torch_cpu`, in torch.

Its operators run on any device.
"""

attention = None  # TEMP

__all__ = ["attention"]
