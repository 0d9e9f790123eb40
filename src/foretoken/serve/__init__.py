"""`foretoken serve`: OpenAI's API over an `AsyncEngine`, exact under speculation.

One flow, and what belongs where:

    protocol/    bodies of requests, one file per API: types, names, what is refused by its name
    requests.py  a body as the engine takes it: `Asked`, with prompts and `SamplingParams`
                 (`conversions.py`: bodies of other APIs)
    running.py   the engine's deltas of everything that was asked, of several prompts in turns
    parsers/     what tokens say: content, reasoning, tool calls; how models write them
    answers/     deltas as events (`events.py`), events as choices (`chat.py`, `completions.py`), as
                 items (`responses.py`) and blocks (`messages.py`), counts (`usage.py`)
    sse.py       an answer whole, or as a stream; choices as chunks
    routes/      one file per family of endpoints; `generate.py` is the flow above: begin there
    metrics.py   what Prometheus scrapes
    logs.py      a line of JSON for each request, around the application in `app.py`
    errors.py    every error as OpenAI's body and a status
    page/        what speculation does, in a browser; served by `routes/page.py`
    app.py       the application; `access.py`: who may call it; `limits.py`: what a body may be
    lifetime.py  deadlines, what is under way, the way out
    server.py    the process in front of it: uvicorn, signals; `connection.py`: one client's;
                 `command.py`: what starts all

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
