"""A Llama-like model as a chain of few kernels, and the parts that such a chain is built of.

Reading order: `decoder` (weights from a module, and the pass), `head` (that of an EAGLE-3 head),
`products` (the residual stream and who multiplies), `tiles` (what products do besides, and what was
measured), `streamk` (few rows), `rowwise` (one row, and what lies between products).
"""

from foretoken.ops.backends.triton.decoder.decoder import FusedDecoder as FusedDecoder
from foretoken.ops.backends.triton.decoder.head import FusedDraftHead as FusedDraftHead
