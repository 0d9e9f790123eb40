"""State by request slot (`table`), and the records of a step (`step`)."""
