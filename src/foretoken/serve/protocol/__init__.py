"""Bodies of requests: types, names, and which fields are inert or refused."""
