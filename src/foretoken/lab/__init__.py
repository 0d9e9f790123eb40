"""The laboratory: measuring and explaining, with the engine and beside it."""
