"""A small benchmark that tests of `foretoken bench` share."""

from __future__ import annotations

from foretoken.config import SpeculativeConfig

SMALL = {"input_len": "12", "output_len": "9", "num_requests": "4", "bandwidth": 40.0}
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=4)
