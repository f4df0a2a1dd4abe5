"""Which blocks share one scan, and where each block's parameters live.

Equal neighbours are folded: (G, G, G, N) x 5 + N becomes a group of four blocks repeated five times
and a group of one. Parameters of block `position` of group `group` are stacked over its repeats on
a leading `layers` axis, under the path `groups.{group}.{position}`, whether they are scanned or
not. `by_block` and `from_blocks` convert to and from one entry per block (`blocks.{index}`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import BlockConfig, ChunkRoutedConfig, HeadRoutedConfig
from jhybrid.parameters import flatten, unflatten


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """`pattern` repeated `repeats` times, beginning with block `start` of the stack."""

    pattern: tuple[BlockConfig, ...]
    repeats: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.repeats * len(self.pattern)

    def block(self, repeat: int, position: int) -> int:
        return self.start + repeat * len(self.pattern) + position


def find_groups(blocks: Sequence[BlockConfig]) -> tuple[Group, ...]:
    """The grouping with the fewest distinct blocks to compile, then with the fewest groups.

    Room for caches, which is set to serve a model, makes no two blocks differ.
    """
    blocks = tuple(map(_without_room, blocks))

    @functools.cache
    def best(start: int) -> tuple[tuple[int, int], tuple[Group, ...]]:
        if start == len(blocks):
            return (0, 0), ()
        options = []
        for length in range(1, len(blocks) - start + 1):
            pattern = blocks[start : start + length]
            repeats, end = 0, start
            while blocks[end : end + length] == pattern:
                repeats, end = repeats + 1, end + length
                (compiled, groups), rest = best(end)
                group = Group(pattern, repeats, start)
                options.append(((compiled + length, groups + 1), (group, *rest)))
        return min(options, key=lambda option: option[0])

    return best(0)[1]


def _without_room(block: BlockConfig) -> BlockConfig:
    if not isinstance(block.mixer, ChunkRoutedConfig | HeadRoutedConfig):
        return block
    return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, kv_capacity=1.0))


def by_block(params: nnx.State, blocks: Sequence[BlockConfig]) -> dict[str, jax.Array]:
    """Parameter values by path with stacks taken apart: `blocks.5.mixer.q_proj.weight`, `embed`."""
    values = {}
    groups = find_groups(blocks)
    for path, value in flatten(params).items():
        names = block_paths(path, groups)
        values.update({path: value} if names is None else dict(zip(names, value, strict=True)))
    return values


def from_blocks(
    values: Mapping[str, jax.Array], params: nnx.State, blocks: Sequence[BlockConfig]
) -> nnx.State:
    """The inverse of `by_block`: a state like `params` (which may be abstract) holding `values`.

    Raises ValueError when a parameter is missing, left over or of another shape.
    """
    left, stacked = dict(values), {}
    groups = find_groups(blocks)
    for path, like in flatten(params).items():
        names = block_paths(path, groups)
        missing = [name for name in names or [path] if name not in left]
        if missing:
            raise ValueError(f"no value for parameter {', '.join(missing)}")
        value = left.pop(path) if names is None else jnp.stack([left.pop(name) for name in names])
        if value.shape != like.shape:
            raise ValueError(f"parameter {path}: expected shape {like.shape}, got {value.shape}")
        stacked[path] = value
    if left:
        raise ValueError(f"values for unknown parameters {', '.join(sorted(left))}")
    return unflatten(params, stacked)


def block_paths(path: str, groups: Sequence[Group]) -> list[str] | None:
    """`blocks.*` paths of the slices of a stacked parameter; None if it belongs to no block."""
    if not path.startswith("groups."):
        return None
    _, group, position, rest = path.split(".", 3)
    found = groups[int(group)]
    return [
        f"blocks.{found.block(repeat, int(position))}.{rest}" for repeat in range(found.repeats)
    ]
