"""One token of the gated delta rule for every row: decoding, with the state updated in place."""

from pallas_kernels.gated_delta_step.api import gated_delta_step as gated_delta_step
