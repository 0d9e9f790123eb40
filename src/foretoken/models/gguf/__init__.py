"""GGUF files as checkpoints: what llama.cpp and its tools write, one file or a split set.

Belongs here: the header (`reader.py`), and what it says in Transformers' terms: configuration
(`config.py`), names of parameters (`names.py`), tokenizer (`tokenizer.py`). Does not: where a file
is (`find.py` chooses among names, `../locate.py` fetches), arithmetic on packed weights.
"""
