"""The gated delta rule: a linear-attention recurrence with scalar decay and an erase term."""

from pallas_kernels.gated_delta_rule.api import gated_delta_rule as gated_delta_rule
from pallas_kernels.gated_delta_rule.stretch import StretchMap as StretchMap
from pallas_kernels.gated_delta_rule.stretch import gated_delta_rule_map as gated_delta_rule_map
