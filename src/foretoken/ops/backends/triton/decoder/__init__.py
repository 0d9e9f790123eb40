"""A stack of Llama-like layers as a chain of few kernels, and the parts of such a chain.

Reading order: `stack` (which stacks fit, and the pass), `products` (the residual stream, and which
kernel multiplies), `tiles` (what products do in addition, and what was measured), `streamk` (few
rows), `rowwise` (one row, and the kernels between products).
"""

from foretoken.ops.backends.triton.decoder.stack import FusedStack as FusedStack
