"""`foretoken serve`: OpenAI's API over an `AsyncEngine`, exact under speculation.

The flow of a request, in `routes/generate.py`: its body (`protocol/`) becomes a `GenerationRequest`
(`requests.py`, `conversions.py`); the engine's deltas (`running.py`) become events
(`answers/events.py`, `parsers/`), which are written for an API (`answers/`) and sent (`sse.py`).
ARCHITECTURE.md says where additions go.

Nothing outside this package imports fastapi, starlette, pydantic, uvicorn or prometheus-client.
`options.py` and `command.py` import them only inside functions: the command line imports both.
"""
