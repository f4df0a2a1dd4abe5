"""Head routers for Llama-3.1-8B-Instruct: elastic_qwen3_4b.py's recipe on this backbone.

    python train.py --config configs/elastic_llama31_8b.py --workdir runs/elastic_llama31_8b \
        --set mesh.fsdp=8

8,437,824 parameters are trained, 8,030,261,248 stay frozen. Cost: see elastic_qwen3_4b.py. The
routers read keys before their rotation; Llama has no norm on them.
"""

from configs.elastic_qwen3_4b import recipe
from jhybrid.config import Experiment, RopeScaling, SoftmaxConfig


def config() -> Experiment:
    return recipe(
        name="elastic_llama31_8b",
        backbone="llama-3.1-8b-instruct",
        chat="llama3",
        attention=SoftmaxConfig(
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=500_000.0,
            rope_scaling=RopeScaling(
                factor=8.0, low_turns=1.0, high_turns=4.0, original_length=8192
            ),
        ),
        depth=32,
        dim=4096,
        width=14_336,
        vocab_size=128_256,
        norm_eps=1e-5,
    )
