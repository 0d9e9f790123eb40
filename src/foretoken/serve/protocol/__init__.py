"""Bodies of requests: names and types of their fields, and which are inert or refused."""
