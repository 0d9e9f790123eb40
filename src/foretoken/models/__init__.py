"""Models: Hugging Face checkpoints, loaded and checked, behind one forward function."""

from foretoken.models.causal_lm import CausalLM
from foretoken.models.checkpoint import load_tokenizer, resolve_checkpoint
from foretoken.models.loader import load_model

__all__ = ["CausalLM", "load_model", "load_tokenizer", "resolve_checkpoint"]
