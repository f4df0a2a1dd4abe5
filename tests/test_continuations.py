"""Scores of continuations equal a plain forward pass over each whole text, in any company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import nnx
from tiny_models import LINEAR, ROUTED, SOFTMAX, VOCAB, build, tiny

from jhybrid.config import HeadRoutedConfig
from jhybrid.errors import UserError
from jhybrid.evals import continuations
from jhybrid.evals.continuations import Request, batches, score
from jhybrid.evals.perplexity import scorer
from jhybrid.mixers import Context

HEADS = HeadRoutedConfig(
    attention=SOFTMAX, block_size=4, local_blocks=1, stride=4, pool_tokens=3, kv_capacity=1.0
)
LONGEST = 64
MODELS = {
    "layers": tiny(LINEAR, SOFTMAX, channels=False),
    "chunks": tiny(ROUTED, ROUTED, channels=False),
    "heads": tiny(HEADS, HEADS, channels=False),
}
pytestmark = pytest.mark.usefixtures("quick_compile")


def requests() -> list[Request]:
    """Contexts of 1 to 40 tokens, with one to five continuations of one to nine each."""
    random = np.random.default_rng(0)

    def draw(n) -> tuple[int, ...]:
        return tuple(map(int, random.integers(0, VOCAB, n)))

    found = []
    for length, choices in ((7, 2), (1, 1), (40, 5), (12, 3), (33, 1)):
        context = draw(length)
        found += [Request(context, draw(random.integers(1, 10))) for _ in range(choices)]
    return [found[i] for i in random.permutation(len(found))]


def full_forward(model):
    """(text, tokens of its context) -> log p of every next token; without a state, row by row."""

    @jax.jit
    def run(tokens, length, context):
        place = jnp.arange(LONGEST)[None]
        asked = Context(positions=place, lengths=length[None], prompt=place < context)
        return jax.nn.log_softmax(model.logits(model(tokens, asked).hidden))[0]

    def log_likelihoods(text, context):
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(run(tokens, len(text), context))

    return log_likelihoods


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "layers" else pytest.mark.slow) for n in MODELS]
)
def test_every_item_equals_a_full_forward_of_its_text(name):
    model, items = build(MODELS[name]), requests()
    forward = full_forward(model)
    # one continuation more, that greedy decoding gives
    context = text = items[0].context
    for _ in range(3):
        text = (*text, int(forward(text, len(context))[len(text) - 1].argmax()))
    items.append(Request(context, text[len(context) :]))
    heard = {}
    scores = score(model, items, batch_size=4, done=heard.__setitem__)
    assert heard == dict(enumerate(scores))
    for (context, continuation), found in zip(items, scores, strict=True):
        text, first = (*context, *continuation), len(context)
        steps = forward(text, first)[first - 1 : len(text) - 1]
        likelihood = steps[np.arange(len(continuation)), continuation].sum()
        assert found.log_likelihood == pytest.approx(likelihood, abs=2e-4)
        assert found.greedy == (steps.argmax(-1) == continuation).all()
    assert scores[-1].greedy
    assert not all(each.greedy for each in scores)


@pytest.mark.slow
def test_scores_do_not_depend_on_what_else_is_asked():
    model, items = build(tiny(ROUTED)), requests()[:6]
    together = score(model, items)
    others = score(model, items[::-1], batch_size=3)[::-1]
    alone = [score(model, [item])[0] for item in items[:2]]
    for one, other in [*zip(together, others, strict=True), *zip(together, alone, strict=False)]:
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
        assert one.greedy == other.greedy
    assert score(model, []) == []


def test_a_context_is_read_once_and_few_shapes_are_compiled():
    random = np.random.default_rng(1)
    contexts = [tuple(map(int, random.integers(0, VOCAB, n))) for n in range(1, 200)]
    items = [Request(c, (1,) * (1 + len(c) % 7)) for c in contexts for _ in range(3)]
    found = list(batches(items, 16))
    read = [context for batch in found for context, _ in batch.groups]
    assert len(read) == len(set(read)) == len(contexts)
    asked = sorted(i for batch in found for _, own in batch.groups for i in own)
    assert asked == list(range(len(items)))
    shapes = {batch[1:] for batch in found}
    # contexts round up to 32, 64, 128 or 256 tokens, continuations to 4 or 8
    assert {shape[:2] for shape in shapes} == {(s, t) for s in (32, 64, 128, 256) for t in (4, 8)}
    assert len(shapes) == 8
    for batch in found:
        rows = sum(len(own) for _, own in batch.groups)
        assert rows <= batch.rows <= 16
        assert len(batch.groups) <= batch.contexts
        assert max(len(context) for context, _ in batch.groups) <= batch.context_length
    crowd = list(batches([Request((1, 2), (3,))] * 9, 4))
    assert [len(own) for batch in crowd for _, own in batch.groups] == [4, 4, 1]


def test_one_program_serves_all_requests_of_rounded_lengths():
    model = build(tiny(LINEAR))
    before = continuations._score._cache_size()
    for length in (3, 17, 30):
        text = tuple(range(length))
        score(model, [Request(text, (1, 2)), Request(text, (3,)), Request((5,), (1, 1, 1))])
    assert continuations._score._cache_size() == before + 1


def test_no_room_for_full_heads_is_said_and_not_hidden():
    model = nnx.merge(*nnx.split(build(tiny(dataclasses.replace(HEADS, kv_capacity=0.4)))))
    bias = model.groups[0][0].mixer.router.route_out.bias
    bias[...] = bias[...] + jnp.array([0.0, 9.0])  # every head wants to be full
    with pytest.raises(UserError, match=r"kv_capacity=0\.4"):
        score(model, [Request((1, 2, 3), (4,))])


def test_padding_of_documents_decides_nothing():
    log_likelihoods = scorer(build(tiny(HEADS)))
    text = tiny_models.tokens(1, 21)
    short = log_likelihoods(text[:, :-1], text[:, 1:])
    inputs, targets = np.zeros((1, 32), np.int32), np.full((1, 32), -1, np.int32)
    inputs[:, :20], targets[:, :20] = text[:, :-1], text[:, 1:]
    padded = log_likelihoods(inputs, targets)
    np.testing.assert_allclose(padded[:, :20], short, atol=1e-4)
    assert (padded[:, 20:] == 0).all()
