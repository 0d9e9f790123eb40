"""The tables and figures of README.md and docs/, from the results files. Begin in documents.py."""
