"""GGUF files as checkpoints: what llama.cpp and its tools write, one file or a split set.

Belongs here: the header (`reader.py`), and its content in Transformers' terms: configuration
(`config.py`), names of parameters (`names.py`), tokenizer (`tokenizer.py`), weights (`weights.py`).
Does not: finding a file (`../locate.py`), arithmetic on packed weights.
"""
