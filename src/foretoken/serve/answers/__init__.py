"""Writing answers: deltas become events, and events the choices, items or blocks of an API."""
