"""Models: Hugging Face checkpoints, loaded and checked, with one forward function for all."""

from foretoken.models.causal_lm import CausalLM, TargetView
from foretoken.models.loader import load_model
from foretoken.models.locate import folder_of, resolve_checkpoint
from foretoken.models.tokenizer import load_tokenizer

__all__ = [
    "CausalLM", "TargetView", "folder_of", "load_model", "load_tokenizer", "resolve_checkpoint",
]  # fmt: skip
