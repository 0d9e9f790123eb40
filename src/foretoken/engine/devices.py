"""The choice of device and backend; an unusable one raises an error before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from foretoken.errors import ConfigError
from foretoken.models.loader import described_gpu
from foretoken.ops import Backend, get_backend, unavailable

_log = logging.getLogger(__name__)

_LEAST_FOR_TRITON = (7, 5)  # lowest compute capability of NVIDIA's GPUs for which Triton compiles


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is PyTorch's current GPU, or the CPU.

    Raises:
        ConfigError: there is no such GPU, or PyTorch cannot use it.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason, is_fault = _why_no_gpu()
        if name == "auto":
            if is_fault:
                _log.warning("Device `cpu`, which is slower: no GPU can be used: %s.", reason)
            return torch.device("cpu")
        remedy = f"PyTorch finds no usable GPU ({reason}). Choose `cpu`, or leave the option out."
        raise ConfigError("device", name, "a device of this machine", remedy)
    count = torch.cuda.device_count()
    index = int(name.partition(":")[2] or 0) if name != "auto" else torch.cuda.current_device()
    if index >= count:
        remedy = f"PyTorch finds {count} GPUs, numbered from 0."
        raise ConfigError("device", name, "a device of this machine", remedy)
    device = torch.device("cuda", index)
    _check_kernels(name, device)
    torch.cuda.set_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make this GPU the current device of the calling thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _why_no_gpu() -> tuple[str, bool]:
    """Why no GPU can be used, and whether the reason is a fault: a PyTorch for CPUs, a missing
    driver and a missing GPU are no faults."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch, {torch.__version__}, was built for CPUs", False
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # the first sentence of the message has the reason
        reason = str(error).partition(". ")[0].rstrip(".")
        return reason, not reason.startswith(("Found no NVIDIA driver", "No CUDA GPUs"))
    return "`nvidia-smi` may say why", True


def _check_kernels(name: str, device: torch.device) -> None:
    if torch.version.hip is not None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    # Architectures such as sm_90 (kernels of one major version) or compute_90 (compiled when used).
    versions = {a: int("".join(filter(str.isdigit, a))) for a in torch.cuda.get_arch_list()}
    for arch, version in versions.items():
        has_kernels = version // 10 == major or arch.startswith("compute")
        if has_kernels and version <= 10 * major + minor:
            return
    bound = f"a GPU for which this PyTorch, {torch.__version__}, has kernels"
    least = min(versions.values(), default=0) / 10
    remedy = f"{described_gpu(device)} has too low a compute capability: kernels need {least:g} or "
    remedy += "more. Choose `cpu`, or install a PyTorch that was built for this GPU."
    raise ConfigError("device", name, bound, remedy)


def choose_backend(
    name: str, device: torch.device, *, deterministic: bool = False,
    why_not: Callable[[str], str | None] = unavailable,
) -> Backend:  # fmt: skip
    """The backend of this name; `auto` is the fastest that this machine can run.

    Args:
        why_not: as `ops.unavailable`: returns why a backend cannot run here, or None.

    Raises:
        ConfigError: the backend is unknown, or cannot run here.
    """
    if name != "auto":
        if name == "triton" and _too_old_for_triton(device):
            remedy = "Choose the backend `torch`, which is slower, or the device `cpu`."
            needed = "Triton needs compute capability 7.5 or more"
            bound = f"one that can run: {needed}, not {described_gpu(device)}"
            raise ConfigError("backend", name, bound, remedy)
        return get_backend(name, deterministic=deterministic)
    name = "native" if device.type == "cpu" else "triton"
    reason = f"this is {described_gpu(device)}" if _too_old_for_triton(device) else why_not(name)
    if reason is not None:
        _log.warning("Backend `torch`, which is slower: `%s` cannot run: %s.", name, reason)
        name = "torch"
    _log.info("Backend `%s`.", name)
    return get_backend(name, deterministic=deterministic)


def _too_old_for_triton(device: torch.device) -> bool:
    is_nvidia = device.type != "cpu" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) < _LEAST_FOR_TRITON
