"""Public clients, unmodified, against `foretoken serve`: one module each, and their matrix."""
