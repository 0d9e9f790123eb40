"""What is kept by request slot: a step as a message, a step on the device, the table."""
