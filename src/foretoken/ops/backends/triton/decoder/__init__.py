"""A Llama-like model as a chain of few kernels, and the parts that such a chain is built of.

Reading order: `decoder` (the pass), `layers` (weights from a module), `products` (the residual
stream and who multiplies), `epilogue` (what products do besides), `streamk` and `gemv` (few rows,
one row), `rowwise` (what lies between products of cuBLAS), `tiles` (what was measured).
"""

from foretoken.ops.backends.triton.decoder.decoder import FusedDecoder as FusedDecoder
