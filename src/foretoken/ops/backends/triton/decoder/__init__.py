"""A Llama-like model as a chain of few kernels, and the parts that such a chain is built of.

Reading order: `decoder` (the pass), `head` (that of an EAGLE-3 head), `layers` (weights from a
module), `products` (the residual stream and who multiplies), `epilogue` (what products do besides),
`streamk` and `gemv` (few rows, one row), `rowwise` (what lies between products), `tiles` (what was
measured).
"""

from foretoken.ops.backends.triton.decoder.decoder import FusedDecoder as FusedDecoder
from foretoken.ops.backends.triton.decoder.head import FusedDraftHead as FusedDraftHead
