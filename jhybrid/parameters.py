"""A model's parameters as a flat dict from dotted path to array, and back.

Checkpoints, exports and `optimizer.trainable` all speak of parameters by these paths
("groups.0.1.mixer.q_proj.weight"), and a plain dict is a plain pytree for optax and orbax.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from jhybrid.errors import UserError

Leaf = TypeVar("Leaf")


def path_of(keys: tuple[Any, ...]) -> str:
    """Dotted path of a leaf of a model state, or of any tree of dicts by path (optimizer moments).

    Only dict keys count: the others are a Variable's own attribute or an optax tuple's field.
    """
    return ".".join(str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey))


def flatten(state: nnx.State) -> dict[str, Any]:
    """The leaves of `state` (arrays, abstract arrays or shardings) by dotted path, in its order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {path_of(keys): leaf for keys, leaf in leaves}


def unflatten(template: nnx.State, leaves: Mapping[str, Any]) -> nnx.State:
    """`template` with its leaves replaced by those of the same path."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[path_of(keys)], template)


def matrix_paths(state: nnx.State) -> frozenset[str]:
    """Paths of the parameters with at least two dimensions besides a stack of layers."""

    def is_matrix(variable: nnx.Variable) -> bool:
        shape = variable.get_value().shape
        axes = variable.get_metadata().get("axes", (None,) * len(shape))
        return sum(axis != "layers" for axis in axes) >= 2

    variables = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )[0]
    return frozenset(path_of(keys) for keys, variable in variables if is_matrix(variable))


def split_trainable(
    leaves: Mapping[str, Leaf], pattern: str
) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """(trainable, frozen): a parameter trains when `pattern` is found anywhere in its path."""
    try:
        found = re.compile(pattern).search
    except re.error as error:
        raise UserError(f"optimizer.trainable={pattern!r}: {error}") from None
    trainable = {path: leaf for path, leaf in leaves.items() if found(path)}
    if not trainable:
        some = ", ".join(list(leaves)[:3])
        raise UserError(f"optimizer.trainable={pattern!r} matches no parameter, such as {some}")
    return trainable, {path: leaf for path, leaf in leaves.items() if path not in trainable}
