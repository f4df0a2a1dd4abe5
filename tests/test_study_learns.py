"""That a model trained as studies train it learns to recall."""

import dataclasses

import pytest
from flax import nnx

from jhybrid.config import (
    AssociativeRecall,
    BlockConfig,
    DataConfig,
    Experiment,
    GatedDeltaNetConfig,
    ModelConfig,
    OptimizerConfig,
    SwiGLUConfig,
    TrainingConfig,
)
from jhybrid.data import load_tokenizer
from jhybrid.model import HybridLM
from jhybrid.parameters import unflatten
from jhybrid.study import recall, together
from jhybrid.study.plan import RecallMeasure


@pytest.mark.slow
def test_two_layers_learn_to_recall_four_pairs(tmp_path):
    task = AssociativeRecall(num_pairs=4, num_queries=4, length=16)
    mixer = GatedDeltaNetConfig(num_heads=2, key_dim=32, value_dim=32)
    block = BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=128))
    experiment = Experiment(
        name="recall",
        model=ModelConfig(
            vocab_size=257,
            dim=64,
            blocks=(block, block),
            tied_head=True,
            compute_dtype="float32",
            remat="none",
        ),
        data=DataConfig(
            sources=(task,),
            tokenizer="bytes",
            sequence_length=64,
            batch_size=32,
            document_alignment=16,
        ),
        optimizer=OptimizerConfig(
            learning_rate=4e-3, warmup_steps=30, schedule="warmup_stable_decay"
        ),
        training=TrainingConfig(steps=600, log_every_steps=100, checkpoint_every_steps=600),
    )
    outcome = together.train(experiment, (0,), tmp_path)[0]
    graphdef, template = nnx.split(
        nnx.eval_shape(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(0))), nnx.Param
    )
    model = nnx.merge(graphdef, unflatten(template, outcome.params))
    of = RecallMeasure(task=dataclasses.replace(task, power=1.0), lengths=(16,))
    rows = recall.measure(model, of, load_tokenizer("bytes"))
    right, asked = (sum(row[name] for row in rows) for name in ("right", "questions"))
    assert asked == 64 * 4
    assert right > 0.95 * asked  # by chance: 1 in 128
