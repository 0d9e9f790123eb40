"""What a request asks for, the keys of its noise, the rates of synthetic acceptance."""

from foretoken.sampling.synthetic import conditional_rates, joint_rates

__all__ = ["conditional_rates", "joint_rates"]
