"""Sampling: what a request asks for (`params`), its state by slot, and the sampler over `ops`."""
