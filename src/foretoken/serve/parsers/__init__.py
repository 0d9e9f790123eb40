"""What the tokens of an answer say: content, reasoning, calls of tools; whatever API asks."""
