"""Which device and which backend compute; and why one that was asked for cannot.

Charter: what is wrong with a machine is said before anything is loaded, with what to choose there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from foretoken.errors import ConfigError
from foretoken.models.loader import described_gpu
from foretoken.ops import Backend, get_backend, unavailable

_log = logging.getLogger(__name__)

_LEAST_FOR_TRITON = (7, 5)  # compute capability below which it compiles for no GPU of NVIDIA


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is the GPU that PyTorch takes by itself, or the CPU.

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
        remedy = f"PyTorch finds no GPU that it can use ({reason}). Choose `cpu`, or leave it out."
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
    """Let what this thread launches from here on go there: each thread has a device of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _why_no_gpu() -> tuple[str, bool]:
    """The reason, and whether there is a GPU or a driver that ought to work."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch, {torch.__version__}, was built for CPUs", False
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # of several sentences; the first says what, and what was found
        reason = str(error).partition(". ")[0].rstrip(".")
        return reason, not reason.startswith(("Found no NVIDIA driver", "No CUDA GPUs"))
    return "`nvidia-smi` may say why", True


def _check_kernels(name: str, device: torch.device) -> None:
    """Raise `ConfigError` if this PyTorch was built without kernels for the GPU."""
    if torch.version.hip is not None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    built = {arch: int("".join(filter(str.isdigit, arch))) for arch in torch.cuda.get_arch_list()}
    runs = (
        number <= 10 * major + minor and (number // 10 == major or arch.startswith("compute"))
        for arch, number in built.items()
    )
    if not any(runs):
        least = min(built.values(), default=0)
        raise ConfigError(
            "device", name, f"a GPU that this PyTorch, {torch.__version__}, has kernels for",
            f"{described_gpu(device)} has too low a compute capability: it takes {least / 10:g} or "
            "more. Choose `cpu`, or a PyTorch that was built for it.",
        )  # fmt: skip


def choose_backend(
    name: str,
    device: torch.device,
    *,
    deterministic: bool = False,
    why_not: Callable[[str], str | None] = unavailable,
) -> Backend:
    """The backend asked for, or the fastest that this machine has.

    Args:
        why_not: the reason why a backend of this name cannot run, or None, see `ops.unavailable`.

    Raises:
        ConfigError: it is unknown, or cannot run here.
    """
    if name != "auto":
        if name == "triton" and _is_old(device):
            remedy = "Choose the backend `torch`, which is slower, or the device `cpu`."
            bound = f"one that can run: its kernels take 7.5 or more, not {described_gpu(device)}"
            raise ConfigError("backend", name, bound, remedy)
        return get_backend(name, deterministic=deterministic)
    name = "native" if device.type == "cpu" else "triton"
    reason = f"this is {described_gpu(device)}" if _is_old(device) else why_not(name)
    if reason is not None:
        _log.warning("Backend `torch`, which is slower: `%s` cannot run: %s.", name, reason)
        name = "torch"
    _log.info("Backend `%s`.", name)
    return get_backend(name, deterministic=deterministic)


def _is_old(device: torch.device) -> bool:
    """Whether Triton has no kernels for this GPU."""
    is_nvidia = device.type != "cpu" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) < _LEAST_FOR_TRITON
