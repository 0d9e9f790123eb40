"""`foretoken serve`: OpenAI's API over an `AsyncEngine`, exact under speculation.

One flow: a body (`protocol/`) as the engine takes it (`requests.py`, `conversions.py`), the
engine's deltas (`running.py`) as events (`answers/events.py`, `parsers/`), written for their API
(`answers/`) and sent (`sse.py`). Begin reading in `routes/generate.py`, which is this flow;
ARCHITECTURE.md has the rest.

What comes next goes here:

    a further API             its body in `protocol/`, its reader in `conversions.py`, its writer in
                              `answers/` (an `AnswerWriter`, see `sse.py`), its route
    a format of tool calls    `parsers/formats.py`: data, and a sign in templates
    a way to generate         through `answer` in `routes/generate.py`: limits, deadlines and the
                              drain are there
    a metric                  `metrics.py`, and its line in docs/server.md

Nothing outside this package imports fastapi, starlette, pydantic, uvicorn or prometheus-client.
`options.py` and `command.py` load them when they must: the command line imports both.
"""
