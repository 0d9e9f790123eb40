"""lm-eval with the server's own tokenizer: likelihoods, generation, chats, by tasks made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.clients.checks import MODEL, must, run

DOCUMENTS = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " [None]"], "answer": 0},
    {"question": "for i in range(", "choices": ["import)", "10):"], "answer": 1},
    {"question": "import", "choices": [" os\n", " ((\n"], "answer": 0},
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "{{question}}"
"""
TASKS = {
    "choose": """
task: choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "write": """
task: write
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match}]
""",
    "roll": """
task: roll
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
}


def _evaluated(url: str, model: str, names: str, *more: str) -> dict[str, Any]:
    """What lm-eval found for the tasks of these names, and all samples, by task."""
    is_chat = "chat" in model
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "documents.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in DOCUMENTS))
        for task, text in TASKS.items():
            (folder / f"{task}.yaml").write_text(text + COMMON % data)
        words = [sys.executable, "-m", "lm_eval", "--model", model, "--tasks", names,
                 "--model_args", f"model={MODEL},base_url={url}{path},tokenizer_backend=remote,"
                 f"num_concurrent=2,max_retries=1,tokenized_requests={not is_chat}",
                 "--include_path", name, "--output_path", f"{name}/out", "--log_samples",
                 *more]  # fmt: skip
        settings = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": f"{name}/hub",
                    "OPENAI_API_KEY": "-"}  # fmt: skip
        done = subprocess.run(
            words, env=settings, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        must(done.returncode == 0, f"lm_eval ends with 0: {done.stdout[-1500:]}")
        (results,) = (folder / "out").rglob("results_*.json")
        samples = {
            file.name.split("_")[1]: [json.loads(line) for line in file.read_text().splitlines()]
            for file in (folder / "out").rglob("samples_*.jsonl")
        }
        return {"results": json.loads(results.read_text())["results"], "samples": samples}


def _completion(url: str, body: dict[str, Any]) -> Any:
    """The one choice of a completion, asked for without a client."""
    data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    sent = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(sent, timeout=60) as answer:
        return json.load(answer)["choices"][0]


def completions_with_remote_tokenizer(url: str) -> dict[str, Any]:
    """Likelihoods are those of the prompt's echo; generated texts those of a plain request."""
    found = _evaluated(url, "local-completions", "choose,write,roll")
    for sample in found["samples"]["write"]:
        body = {"prompt": sample["doc"]["question"], "max_tokens": 24, "stop": ["\n\n"]}
        must(
            sample["resps"] == [[_completion(url, body)["text"]]], "lm-eval's text is the server's"
        )
    for sample in found["samples"]["choose"]:
        question = sample["doc"]["question"]
        for choice, told in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            body = {"prompt": question + choice, "max_tokens": 1, "logprobs": 1, "echo": True}
            echo = _completion(url, body)["logprobs"]
            offsets = enumerate(echo["text_offset"])
            start = next(i for i, at in offsets if at >= len(question))
            expected = sum(echo["token_logprobs"][start:-1])
            must(abs(float(told[0][0]) - expected) < 1e-3, "lm-eval's likelihood is the echo's")
    accuracy = found["results"]["choose"]["acc,none"]
    must(accuracy == 1.0, "a model of Python knows Python")
    return {"documents": len(DOCUMENTS), "accuracy": accuracy}


def chats_with_the_servers_template(url: str) -> dict[str, Any]:
    """`local-chat-completions`, its conversations as the client sends them."""
    found = _evaluated(url, "local-chat-completions", "write", "--apply_chat_template")
    texts = [sample["resps"][0][0] for sample in found["samples"]["write"]]
    must(all(isinstance(text, str) for text in texts), "texts")
    return {"documents": len(texts)}


if __name__ == "__main__":
    run(completions_with_remote_tokenizer, chats_with_the_servers_template)
