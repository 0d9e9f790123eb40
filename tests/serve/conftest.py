"""One server with the embedded model for all tests, real clients, and `LLM` to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from foretoken import LLM, AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.serve.running import Running, running
from tests.support.asynchronous import PATIENCE

TEMPLATE = (
    "{% if tools %}@ {{ tools | tojson }}\n{% endif %}{% for message in messages %}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>\n{% endif %}"
    "# {{ message.content }}\n{% for call in message.tool_calls or () %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>\n"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ opening | default('') }}{% endif %}"
)
SPECULATION = {
    "drafters": [{"method": "draft_model"}, {"method": "prediction"}],
    "method": "draft_model",
    "num_speculative_tokens": 5,
}


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    engine = AsyncEngine("tiny-python", SPECULATION, threads=1)
    names = ("tiny", "other")
    with running(engine, ServeOptions(served_model_name=names, chat_template=TEMPLATE)) as server:
        yield server


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    llm = LLM("tiny-python", SPECULATION, threads=1)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client
