"""Paged attention, alone or fused with the norms, rotary embedding and K/V write before it.

Shape suffixes: T packed tokens, H query heads, D head size, B requests, P positions, R rotated
dimensions of a head, W a row of q, k and v, C = H * D_v.
"""

from foretoken.ops.backends.triton.attention.attend import MOST_NEW as MOST_NEW
from foretoken.ops.backends.triton.attention.attend import attend_new as attend_new
from foretoken.ops.backends.triton.attention.attend import attention as attention
from foretoken.ops.backends.triton.attention.attend import prepare as prepare
from foretoken.ops.backends.triton.attention.attend import write_new as write_new
from foretoken.ops.backends.triton.attention.records import HeadInputs as HeadInputs
