"""Noise for tests and tools: that of `torch`. The kernels draw theirs in `csrc/noise.h`."""

from foretoken.ops.backends.torch.noise import philox, uniform

__all__ = ["philox", "uniform"]
