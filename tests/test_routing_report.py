"""The routing report: its numbers are the model's decisions, its page is whole, safe and alone."""

import functools
import html.parser
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from tiny_models import build

from jhybrid import routing_report
from jhybrid.checkpoint import write_export
from jhybrid.data import load_tokenizer
from jhybrid.mixers import Context
from jhybrid.parameters import flatten

pytestmark = pytest.mark.usefixtures("quick_compile")
TEXT = 'Brackets <script>alert("&amp;")</script>, {{data}} and naïve €uros — ' * 3


class Page(html.parser.HTMLParser):
    """The pieces of the text, the embedded numbers, and every address the page would load."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.addresses, self.pieces, self.data = [], [], [], ""
        self._inside = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside.append((tag, dict(attrs)))
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if self._in_text() and tag == "span":
            self.pieces.append("")

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._in_text():
            self.pieces[-1] += data
        if self._inside and self._inside[-1][1].get("id") == "data":
            self.data += data

    def _in_text(self):
        return any(attrs.get("id") == "text" for _, attrs in self._inside)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    experiment = tiny.config()
    params = flatten(nnx.state(build(experiment.model), nnx.Param))
    return str(write_export(experiment, params, tmp_path_factory.mktemp("export") / "model"))


@pytest.fixture
def command(run_command):
    return functools.partial(run_command, routing_report)


def test_the_report_shows_the_decisions_of_the_model_over_the_text(command, checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "report.html"
    status, printed, err = command(
        *("--checkpoint", checkpoint, "--text", tmp_path / "text.txt", "--out", out),
        *("--max-tokens", 200),
    )
    assert (status, err) == (0, "")
    page = Page(out.read_text())
    tokens = np.frombuffer(TEXT.encode(), np.uint8)[:200]  # the tokenizer's ids are the bytes
    assert "".join(page.pieces) == tokens.tobytes().decode(errors="replace")
    assert len(page.pieces) == 13  # of 16 tokens, the last one open
    report = json.loads(out.with_suffix(".json").read_text())
    assert json.loads(page.data) == report

    model = build(tiny.config().model)
    positions = jnp.arange(200)[None]
    run = jax.jit(lambda tokens: model(tokens, Context(positions=positions)).reports)
    decided = run(jnp.asarray(tokens, jnp.int32)[None])
    scores = np.asarray(decided["blocks.1"]["scores"])[0, :12]  # of the chunks that are complete
    (layer,) = report["layers"]
    assert (layer["block"], layer["chunk_size"], report["tokens"]) == (1, 16, 200)
    assert 0 < layer["softmax_fraction"] < 1
    for h, head in enumerate(layer["heads"]):
        np.testing.assert_allclose(head["margin"], scores[:, h, 0] - scores[:, h, 1], atol=1e-4)
        np.testing.assert_array_equal(head["softmax"], np.array(head["margin"]) >= 0)
        assert head["softmax_fraction"] == np.mean(head["softmax"])
    assert report["bytes_per_token"] == 2 * (8 + 8) * 4  # heads * (K + V) * fp32
    assert report["kept_bytes_per_token"] == layer["softmax_fraction"] * 2 * (8 + 8) * 4
    assert printed.startswith(f"{100 * layer['softmax_fraction']:.1f} % of chunks to softmax")


def test_the_page_loads_nothing_and_runs_nothing_of_the_text(tmp_path):
    report = {
        "tokens": 4,
        "piece_tokens": 4,
        "softmax_fraction": 1.0,
        "bytes_per_token": 2,
        "kept_bytes_per_token": 2.0,
        "margin_scale": 1.0,
        "text": "</script><script>alert(1)</script>",
        "layers": [],
    }
    evil = '<img src="http://x/"> </div> {{data}} &lt;'
    made = routing_report.render("<b>name", "<i>source", report, [evil])
    page = Page(made)
    assert page.pieces == [evil]
    assert page.addresses == []
    assert page.tags.count("script") == 2
    assert json.loads(page.data) == report
    assert not {"b><name", "img", "link", "iframe"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\(", made.replace(html.escape(evil), ""))


@pytest.mark.parametrize("name", ["bytes", "bpe4096"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_are_the_text_cut_between_characters(name, size):
    tokenizer = load_tokenizer(name)
    tokens = tokenizer.encode(TEXT)
    pieces = routing_report.pieces(tokenizer, tokens, size)
    assert "".join(pieces) == TEXT
    assert len(pieces) == -(-len(tokens) // size)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"short", [], "5 tokens are less than a chunk of 16"),
        (b"\xff\xfe", [], "not UTF-8 text"),
        (b"x" * 20, ["--out", "report.txt"], "expected a name that ends in .html"),
        (b"x" * 20, ["--out", "/nowhere/report.html"], "/nowhere/report.json: cannot be written"),
        (b"x" * 20, ["--max-tokens", "0"], "expected a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    command, checkpoint, tmp_path, monkeypatch, content, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(content)
    status, out, err = command("--checkpoint", checkpoint, "--text", "text", *options)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
