"""What is kept by request slot: the table and its owners, histories of edited requests."""
