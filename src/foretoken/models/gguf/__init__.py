"""GGUF files of llama.cpp as checkpoints, one file or a split set."""
