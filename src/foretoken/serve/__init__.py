"""`foretoken serve`: OpenAI's API over an `AsyncEngine`, exact under speculation.

The flow of a request: its body (`protocol/`) becomes a `GenerationRequest` (`requests.py`,
`conversions.py`); the engine's deltas (`running.py`) become events (`answers/events.py`,
`parsers/`), which are written for an API (`answers/`) and sent (`sse.py`). Start reading in
`routes/generate.py`, which is this flow; ARCHITECTURE.md has the rest.

Where additions go:

    a further API             its body in `protocol/`, its reader in `conversions.py`, its writer in
                              `answers/` (an `AnswerWriter`, see `sse.py`), its route
    a format of tool calls    `parsers/formats.py`: its data, and its sign in templates
    a way to generate         through `answer` in `routes/generate.py`, which has the limits, the
                              deadlines and the drain
    a metric                  `metrics.py`, and its line in docs/server.md

Nothing outside this package imports fastapi, starlette, pydantic, uvicorn or prometheus-client.
`options.py` and `command.py` import them only inside functions: the command line imports both.
"""
