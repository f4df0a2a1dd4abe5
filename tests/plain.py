"""The tiny experiment without its routed block, for what does not depend on it: compiles faster."""

import tiny

from jhybrid.config import Experiment


def config() -> Experiment:
    routed = tiny.config()
    return tiny.change(routed, model={"blocks": routed.model.blocks[:1]})
