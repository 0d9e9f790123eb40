"""The audit of models with quantised weights: it passes the right ones, and no wrong one.

Their products round what they read, and the reference does so, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.lab.audit.engine import EngineAudit, draft_reference, reference_of
from foretoken.lab.audit.verdict import audit
from tests.lab.test_audit_engine import Large, accepting_everything, check_right
from tests.models.compressed_models import Scheme
from tests.models.compressed_models import Written as WrittenCompressed
from tests.models.gguf_models import Written
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

DRAWS = 8000


def gguf_pair(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The draft model has the target's numbers in fewer bits."""
    target, draft = (Written(folder, "llama", mix).file for mix in ("Q8_0", "Q4_0"))
    return target, {"method": "draft_model", "model": str(draft)}


def compressed(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Output layers are plain; what is drafted has little to do with the target."""
    schemes = {"int4": Scheme(4, "group", 32), "int8": Scheme(8, "channel")}
    target, draft = (WrittenCompressed(folder / n, "llama", s).folder for n, s in schemes.items())
    return target, {"method": "draft_model", "model": str(draft)}


@pytest.fixture(scope="module", params=[gguf_pair, compressed])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model, speculation = request.param(tmp_path_factory.mktemp("model"))
    speculation["num_speculative_tokens"] = 3
    with LLM(str(model), speculation, max_num_seqs=64, num_blocks=640) as llm:
        assert type(llm.engine.runner.model.network).__name__ == "NativeStack"
        yield llm


@pytest.fixture
def asked(served: LLM) -> EngineAudit:
    reference = reference_of(served)
    params = SamplingParams(temperature=1.0)
    return Large(served, params, reference, 0, draft_reference(served, reference))


def test_the_engine_passes(asked: EngineAudit) -> None:
    check_right(audit(asked.subject("x")._replace(exact=None), DRAWS))


def test_greedy_tokens_are_the_likeliest(asked: EngineAudit) -> None:
    bug, line = asked.greedy()
    assert bug is None, line
    assert " 0 bugs " in line


def test_a_broken_rule_is_refuted(served: LLM, asked: EngineAudit) -> None:
    with accepting_everything(served):
        found = audit(asked.subject("x")._replace(exact=None), DRAWS)
    assert found.refuted, found.verdict
