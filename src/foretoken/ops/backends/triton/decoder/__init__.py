"""A Llama-like model as a chain of few kernels, and the parts that such a chain is built of.

Reading order: `stack` (the pass), `products` (the residual stream and who multiplies), `tiles`
(what products do besides, and what was measured), `streamk` (few rows), `rowwise` (one row, and
what lies between products).
"""

from foretoken.ops.backends.triton.decoder.stack import FusedStack as FusedStack
