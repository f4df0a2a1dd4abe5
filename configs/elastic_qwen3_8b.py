"""Head routers for Qwen3-8B: elastic_qwen3_4b.py's recipe on the larger backbone.

    python train.py --config configs/elastic_qwen3_8b.py --workdir runs/elastic_qwen3_8b \
        --set mesh.fsdp=8

9,492,552 parameters are trained, 8,190,735,360 stay frozen. Cost: see elastic_qwen3_4b.py.
"""

from configs.elastic_qwen3_4b import ATTENTION, recipe
from jhybrid.config import Experiment


def config() -> Experiment:
    return recipe(
        name="elastic_qwen3_8b",
        backbone="qwen3-8b",
        chat="qwen3",
        attention=ATTENTION,
        depth=36,
        dim=4096,
        width=12_288,
        vocab_size=151_936,
        norm_eps=1e-6,
    )
