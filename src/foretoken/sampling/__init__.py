"""Sampling: what a request asks for (`params`), its state by slot, and the sampler over `ops`."""

from foretoken.sampling.synthetic import conditional_rates, joint_rates

__all__ = ["conditional_rates", "joint_rates"]
