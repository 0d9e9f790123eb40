"""Training code for the models that ship with the package."""
