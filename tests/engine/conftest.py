"""A target and an unlike draft, made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights, slightly moved: drafts are sometimes accepted, sometimes not."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = save_checkpoint(tmp_path_factory.mktemp("draft"), seed=1)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: w + 0.03 * torch.randn(w.shape, generator=generator)
        for name, w in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
