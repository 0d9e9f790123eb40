"""Drafting: the contract (`base`), the names (`registry`), one file per drafter."""
