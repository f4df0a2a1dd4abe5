"""`python -m jhybrid.generate` from its arguments to what it prints, with a tiny random model."""

import functools
import json

import numpy as np
import pytest
import tiny
from flax import nnx
from tiny_models import build

from jhybrid import generate
from jhybrid.checkpoint import write_export
from jhybrid.parameters import flatten

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPTS = ["To be,", "or not to be, that is the", "q"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    experiment = tiny.config()
    params = flatten(nnx.state(build(experiment.model), nnx.Param))
    return str(write_export(experiment, params, tmp_path_factory.mktemp("export") / "model"))


@pytest.fixture
def command(run_command):
    return functools.partial(run_command, generate)


@pytest.mark.slow
def test_prompts_are_continued_the_same_for_one_seed_in_batches_of_any_size(
    command, checkpoint, tmp_path
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(PROMPTS) + "\n")
    drawn = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--max-new-tokens", "9"]

    def complete(*options):
        status, out, err = command("--checkpoint", checkpoint, "--prompt-file", prompts, *options)
        assert (status, err) == (0, "")
        return out

    out = tmp_path / "out.jsonl"
    first = complete(*drawn, "--seed", "4", "--batch-size", "3", "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert first == "".join(f"{row['prompt']}{row['completion']}\n\n" for row in rows)
    assert len({row["completion"] for row in rows}) == 3
    assert complete(*drawn, "--seed", "4", "--batch-size", "2") == first
    assert complete(*drawn, "--seed", "5", "--batch-size", "3") != first


def test_jsonl_prompts_may_hold_line_breaks_and_the_memory_is_reported(
    command, checkpoint, tmp_path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a\nb", "id": 1}) + "\n")
    status, out, err = command(
        *("--checkpoint", checkpoint, "--prompt-file", prompts, "--max-new-tokens", 29),
        *("--memory", "--set", "model.blocks.*.mixer.kv_capacity=0.5"),
    )
    assert status == 0
    assert out.startswith("a\nb")
    lines = err.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "Softmax"], ["1", "ChunkRouted"]]
    allocated = float(lines[2].split()[3])
    every_token = 2 * (8 + 8) * 4  # heads * (K + V) * fp32
    assert allocated == every_token * (1 + 1) * 16 / 32  # of two chunks one, and an open one


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("p.txt", b"\n \n", [], "no prompts"),
        ("p.txt", b"\xff", [], "not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 1}', [], r"p.jsonl:2: expected an object"),
        ("p.jsonl", b"{", [], r"p.jsonl:1: not JSON"),
        ("p.txt", b"a", ["--top-p", "0"], "top_p=0.0 must lie in"),
        ("p.txt", b"a", ["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        ("p.txt", b"a", ["--seed", "-1"], "--seed -1: must lie in"),
        ("p.txt", b"a", ["--top-k", "x"], "argument --top-k: invalid int value: 'x'"),
        ("p.txt", b"a", ["--set", "model.dim=32"], "--set model.dim=32: changes parameter"),
        ("p.txt", b"a", ["--set", "model.nothing=1"], "model.nothing: unknown field"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    command, checkpoint, tmp_path, name, content, options, message
):
    prompts = tmp_path / name
    prompts.write_bytes(content)
    status, out, err = command("--checkpoint", checkpoint, "--prompt-file", prompts, *options)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_missing_files_are_named(command, checkpoint, tmp_path):
    status, _, err = command("--checkpoint", checkpoint, "--prompt-file", tmp_path / "none")
    assert status == 2
    assert "none: cannot be read (No such file" in err
    (tmp_path / "p").write_text("a")
    status, _, err = command("--checkpoint", tmp_path, "--prompt-file", tmp_path / "p")
    assert status == 2
    assert "neither a run's workdir" in err


def test_a_completion_ends_before_the_end_of_the_document():
    class Ends:
        eos = 7

    assert generate.continuation(Ends, [1, 7, 7]) == [1]
    assert generate.continuation(Ends, [1, 2]) == [1, 2]
    assert generate.continuation(Ends, np.array([7]).tolist()) == []
