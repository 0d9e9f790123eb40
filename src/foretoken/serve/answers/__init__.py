"""What the server writes: deltas as events, and each API's choices, items and blocks of them."""
