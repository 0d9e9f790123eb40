"""Reading an answer's text as content, reasoning and tool calls, for every API."""
