"""jaxtyping re-exports and the glossary of shape letters used in every signature.

B  batch                     K  key head dim         C  tokens per chunk (or block)
T  query tokens              V  value head dim       N  chunks (or blocks), N = ceil(T / C)
S  key tokens                D  model width          R  routes: rows of a routing decision
H  query or value heads      F  feed-forward width   L  layers
G  key/value heads of softmax attention, H a multiple of G
Hk query/key heads of the delta rule, H a multiple of Hk

Arrays are [batch, time, heads, dim] at every public boundary. A recurrent state is [B, H, K, V].
"""

from jaxtyping import Array as Array
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Int as Int
from jaxtyping import Shaped as Shaped
