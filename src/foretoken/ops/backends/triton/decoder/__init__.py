"""A stack of Llama-like layers as a chain of few kernels, and the parts of such a chain.

Reading order: `stack` (what fits, and the pass), `products` (the residual stream and who
multiplies), `tiles` (what products do besides, and what was measured), `streamk` (few rows),
`rowwise` (one row, and what lies between products).
"""

from foretoken.ops.backends.triton.decoder.stack import FusedStack as FusedStack
