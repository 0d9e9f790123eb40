"""Noise for tests and tools: that of `torch_cpu`. The kernels draw theirs in `csrc/noise.h`."""

from foretoken.ops.backends.torch_cpu.noise import philox, uniform

__all__ = ["philox", "uniform"]
