"""Endpoints: one module for each group, with a `router`."""
