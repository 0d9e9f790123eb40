"""Endpoint pickers of the Gateway API read our metrics: by the parser that they use, in Go.

The picker's own rules are stated here: which families it asks for by default, and that of a family
it takes the newest sample. Debian's packages have the parser, `expfmt` of Prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.serve.running import running
from tests.support.asynchronous import PATIENCE

LIBRARY = Path("/usr/share/gocode")
pytestmark = [
    pytest.mark.trial,
    pytest.mark.skipif(
        shutil.which("go") is None or not (LIBRARY / "src/github.com/prometheus/common").is_dir(),
        reason="needs Debian's golang-go and golang-github-prometheus-common-dev",
    ),
]
READS = {
    "vllm:num_requests_waiting": "", "vllm:num_requests_running": "",
    "vllm:kv_cache_usage_perc": "", "vllm:cache_config_info": "block_size",
}  # fmt: skip
"""Families that a picker asks for by default, and the label that it reads in place of a value."""
PROGRAM = """
package main

import (
	"encoding/json"
	"os"

	"github.com/prometheus/common/expfmt"
)

func main() {
	parser := expfmt.TextParser{}
	families, err := parser.TextToMetricFamilies(os.Stdin)
	if err != nil {
		panic(err)
	}
	found := map[string][]map[string]string{}
	values := map[string][]float64{}
	for name, family := range families {
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			found[name] = append(found[name], labels)
			values[name] = append(values[name], metric.GetGauge().GetValue())
		}
	}
	json.NewEncoder(os.Stdout).Encode(map[string]interface{}{"labels": found, "values": values})
}
"""


@pytest.fixture(scope="module")
def parse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("go")
    (folder / "main.go").write_text(PROGRAM)
    environment = os.environ | {
        "GO111MODULE": "off",
        "GOPATH": str(LIBRARY),
        "GOCACHE": str(folder / "cache"),
        "CGO_ENABLED": "0",
    }
    words = ["go", "build", "-o", "parse", "main.go"]
    subprocess.run(words, cwd=folder, env=environment, check=True, timeout=PATIENCE)
    return folder / "parse"


def test_a_picker_finds_what_it_asks_for(parse: Path, target: Path) -> None:
    engine = AsyncEngine(str(target))
    with running(engine, ServeOptions()) as server:
        text = httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/health").status_code == 200
        blocks = engine.engine.scheduler.pool.block_size
    read = json.loads(subprocess.run([parse], input=text.encode(), capture_output=True).stdout)
    for name, label in READS.items():
        (labels,) = read["labels"][name]
        assert int(labels[label]) == blocks if label else read["values"][name] == [0.0]


def test_the_parser_refuses_what_is_no_exposition(parse: Path) -> None:
    ended = subprocess.run([parse], input=b"vllm:num{ 1\n", capture_output=True)
    assert ended.returncode != 0
