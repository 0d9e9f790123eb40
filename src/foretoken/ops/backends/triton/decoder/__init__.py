"""A stack of Llama-like layers as a chain of few kernels; begin with `stack.py`."""

from foretoken.ops.backends.triton.decoder.stack import FusedStack as FusedStack
