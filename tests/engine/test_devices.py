"""Which device and backend are chosen, and what is said of a machine, made up, that cannot."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foretoken.engine import devices
from foretoken.errors import ConfigError
from foretoken.models.loader import check_dtype
from foretoken.ops import unavailable

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://x Alternatively, ..."
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU."
GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def made(
        capability: tuple[int, int] = (9, 0), reason: str | None = None, cuda: str | None = "13.0"
    ) -> None:
        def init() -> None:
            if reason is not None:
                raise RuntimeError(reason)

        monkeypatch.setattr(torch.version, "cuda", cuda)
        for name, answer in {
            "is_available": lambda: reason is None and cuda is not None,
            "init": init,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "get_device_capability": lambda device=None: capability,
            "get_device_name": lambda device=None: "NVIDIA Made-up",
            "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90", "compute_90"],
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    return made


def test_a_gpu_is_taken_where_there_is_one(machine: Callable[..., None]) -> None:
    machine()
    assert devices.choose_device("auto") == devices.choose_device("cuda:0") == GPU
    assert devices.choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="finds 1 GPUs, numbered from 0"):
        devices.choose_device("cuda:1")


@pytest.mark.parametrize(
    ("reason", "cuda", "said"),
    [
        (TOO_OLD, "13.0", r"is too old \(found version 11040\)\)\. Choose `cpu`"),
        (NO_DRIVER, "13.0", "Found no NVIDIA driver on your system"),
        (None, None, "was built for CPUs"),
    ],
)
def test_why_there_is_no_gpu(
    machine: Callable[..., None], reason: str | None, cuda: str | None, said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    machine(reason=reason, cuda=cuda)
    with pytest.raises(ConfigError, match=said) as caught:
        devices.choose_device("cuda")
    assert "http" not in str(caught.value)
    assert devices.choose_device("auto").type == "cpu"
    assert ("too old" in caplog.text) == (reason is TOO_OLD), "a fault is not passed over"


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 0), False), ((7, 5), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
)
def test_a_gpu_that_this_pytorch_has_kernels_for(
    machine: Callable[..., None], capability: tuple[int, int], runs: bool
) -> None:
    """8.9 runs kernels of 8.0, 12.0 compiles those of `compute_90`."""
    machine(capability)
    if runs:
        assert devices.choose_device("cuda") == GPU
        return
    expected = r"Made-up \(compute capability 7\.0\).* kernels need 7\.5 or more\. Choose `cpu`"
    with pytest.raises(ConfigError, match=expected):
        devices.choose_device("cuda")


def test_a_gpu_without_triton_kernels(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine((7, 0))
    assert devices.choose_backend("torch", GPU).name == "torch"
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        assert devices.choose_backend("auto", GPU).name == "torch"
    assert "slower" in caplog.text
    assert "NVIDIA Made-up (compute capability 7.0)" in caplog.text
    with pytest.raises(ConfigError, match=r"7\.5 or more, not NVIDIA Made-up.*`torch`.*`cpu`"):
        devices.choose_backend("triton", GPU)


@pytest.mark.parametrize(("device", "fastest"), [(GPU, "triton"), (torch.device("cpu"), "native")])
def test_without_kernels_stock_operators_compute_and_a_warning_says_why(
    machine: Callable[..., None],
    device: torch.device,
    fastest: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine()
    missing = {fastest: "it is not installed"}
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        assert devices.choose_backend("auto", device, why_not=missing.get).name == "torch"
    (record,) = caplog.records
    said = f"Backend `torch`, which is slower: `{fastest}` cannot run: it is not installed."
    assert (record.levelname, record.getMessage()) == ("WARNING", said)


@pytest.mark.skipif(unavailable("triton") is None, reason="it runs here")
def test_a_backend_that_is_named_and_cannot_run_is_an_error() -> None:
    reason = re.escape(str(unavailable("triton")))
    with pytest.raises(ConfigError, match=f"This one cannot: {reason}") as caught:
        devices.choose_backend("triton", torch.device("cpu"))
    assert caught.value.field == "backend"


@pytest.mark.parametrize("asked", ["auto", "bfloat16"])
def test_a_gpu_without_bfloat16(machine: Callable[..., None], asked: str) -> None:
    machine((7, 5))
    expected = r"`dtype` is .*float16 or float32.*Made-up \(compute capability 7\.5\).*8\.0"
    with pytest.raises(ConfigError, match=expected):
        check_dtype(asked, torch.bfloat16, GPU)
    others: list[Any] = [(torch.float16, GPU), (torch.bfloat16, torch.device("cpu"))]
    for dtype, device in others:
        check_dtype(asked, dtype, device)
    machine((8, 0))
    check_dtype(asked, torch.bfloat16, GPU)
