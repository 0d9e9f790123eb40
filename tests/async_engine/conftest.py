"""A tiny checkpoint, an engine for every test, and what `LLM` answers to the prompts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken import LLM, AsyncEngine
from tests.async_engine.loops import WatchedLoop
from tests.engine.doubles import ON_HOST, Double, engine_of
from tests.support.asynchronous import OPTIONS, PARAMS, PROMPTS, run, thread_of
from tests.support.checkpoints import save_checkpoint


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run in an event loop of their own, within `PATIENCE`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), WatchedLoop)
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    outputs = LLM(str(folder), {"method": "ngram"}, **OPTIONS).generate(PROMPTS, PARAMS)
    return {str(o.prompt): o.outputs[0].token_ids for o in outputs}


@pytest.fixture
def engine(folder: Path) -> Iterator[AsyncEngine]:
    """Its tokenizer is a `Double`, to which tests give methods of their own."""
    served = engine_of(ON_HOST, folder, {"method": "ngram"}, **OPTIONS)
    served.tokenizer = Double(served.tokenizer)
    engine = AsyncEngine.from_engine(served)
    yield engine
    asyncio.run(engine.close())
    assert not thread_of(engine).is_alive()
