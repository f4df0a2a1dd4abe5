"""Which device holds what: the mesh, the logical-axis rules, and the only `shard_map`.

Parameters carry logical axis names (`nnx.Param(value, axes=("embed", "heads"))`), activations are
pinned by `constrain`, and ops that the compiler cannot partition by itself (Mosaic kernels) run
through `shard_op`. No other file names a mesh axis. `RULES` is the whole policy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jhybrid.config import MeshConfig
from jhybrid.errors import UserError

AXES = ("data", "fsdp", "tensor", "context")

RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "time": None,
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
}

LogicalAxes = tuple[str | None, ...]


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The first data*fsdp*tensor*context devices as a mesh of Auto axes.

    Raises UserError when there are too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = tuple(getattr(config, axis) for axis in AXES)
    needed = math.prod(shape)
    if needed > len(devices):
        sizes = "*".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise UserError(f"{sizes} needs {needed} devices, this run has {len(devices)}")
    grid = np.asarray(devices[:needed], dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_shardings(tree: Any, mesh: Mesh) -> Any:
    """The same tree with a NamedSharding in place of every array.

    A variable is split by its `axes` metadata under RULES; a dimension that its mesh axes do not
    divide, and any leaf that is no variable with `axes` (a step counter), is replicated. Optimizer
    moments keep their parameter's metadata, so this also serves an optimizer state.
    """

    def leaf(node: Any) -> Any:
        if not isinstance(node, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        shape = node.get_value().shape
        axes = node.get_metadata().get("axes", (None,) * len(shape))
        if len(axes) != len(shape):
            raise ValueError(f"axes={axes} name {len(axes)} dimensions of a {shape} parameter")
        return node.replace(NamedSharding(mesh, _spec(axes, shape, mesh)))

    return jax.tree.map(leaf, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over the data-parallel axes: the layout of a batch fed to a step."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins `x` to the layout RULES give its leading dimensions; the rest is replicated.

    Does nothing without a mesh, on one device, or inside `shard_op`.
    """
    mesh = _auto_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(axes, x.shape, mesh))


def axis_shards(axis: str, size: int) -> int:
    """How many parts a dimension of `size` named `axis` is split into under the current mesh."""
    mesh = _auto_mesh()
    return 1 if mesh is None else _shards(_fit(axis, size, mesh), mesh)


def shard_op(
    op: Callable[..., Any],
    in_axes: Mapping[str, LogicalAxes] | Sequence[LogicalAxes],
    out_axes: LogicalAxes | tuple[LogicalAxes, ...],
) -> Callable[..., Any]:
    """`op` run on each device's own slice of its arguments, without communication.

    `in_axes` gives, by argument name (then the result is called with keywords) or by position, the
    logical axes of the leading dimensions of every array in that argument, which may be a pytree
    (a block mask) or None. Keyword arguments it does not name are passed on untouched. `out_axes`
    gives the same for the result, or for each item when the result is a tuple.

    All arguments agree on each axis. A dimension of size 1 is broadcast (one key head shared by
    all query heads). If the devices do not divide `batch`, they hold copies of it; if they do not
    divide `heads`, UserError: the answer would be right but every device would do all the work.
    Without a mesh, on a mesh of one device, and inside another `shard_op`, calls `op` directly.
    """
    named = isinstance(in_axes, Mapping)
    by_argument: dict[Any, LogicalAxes] = dict(in_axes if named else enumerate(in_axes))
    several = bool(out_axes) and isinstance(out_axes[0], tuple)

    def call(*args: Any, **kwargs: Any) -> Any:
        mesh = _auto_mesh()
        if mesh is None:
            return op(*args, **kwargs)
        if named:
            if args:
                raise TypeError(f"{_name(op)}: arguments with named axes are passed by keyword")
            arrays = {name: kwargs.pop(name) for name in by_argument if name in kwargs}
        else:
            arrays = dict(enumerate(args))
        layout = _agree(_name(op), arrays, by_argument, mesh)

        def specs(axes: Any, value: Any) -> Any:
            return jax.tree.map(lambda x: _op_spec(axes, x.shape, layout), value)

        def local(arrays: dict) -> Any:
            if named:
                return op(**arrays, **kwargs)
            return op(*arrays.values(), **kwargs)

        shapes = jax.eval_shape(local, arrays)
        out_specs = tuple(map(specs, out_axes, shapes)) if several else specs(out_axes, shapes)
        # Pallas calls declare no replication types, hence check_vma=False.
        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=({key: specs(by_argument[key], x) for key, x in arrays.items()},),
            out_specs=out_specs,
            check_vma=False,
        )
        return sharded(arrays)

    return call


def _auto_mesh() -> AbstractMesh | None:
    """The current mesh if it has several devices and is not already split by a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def _shards(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _fit(axis: str | None, size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes of logical `axis`, cut to the longest prefix whose product divides `size`."""
    if axis is None:
        return ()
    rule = RULES[axis]
    axes = (rule,) if isinstance(rule, str) else rule or ()
    while size % _shards(axes, mesh):
        axes = axes[:-1]
    return axes


def _spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh):
    """PartitionSpec of one array; a mesh axis met twice stays with the first dimension."""
    used: set[str] = set()
    entries = []
    for axis, size in zip(axes, shape, strict=False):
        fitted = _fit(axis, size, mesh)
        entries.append(fitted if fitted and not used & set(fitted) else None)
        used.update(fitted)
    return PartitionSpec(*entries)


def _op_spec(axes: LogicalAxes, shape: Sequence[int], layout: Mapping[str, Any]) -> PartitionSpec:
    split = (axis if size > 1 else None for axis, size in zip(axes, shape, strict=False))
    return PartitionSpec(*(layout.get(axis) if axis else None for axis in split))


def _agree(op: str, arrays: Mapping, axes: Mapping, mesh: AbstractMesh) -> dict[str, tuple | None]:
    """Mesh axes of each logical axis of an op call, the same for all its arguments."""
    sizes: dict[str, set[int]] = {}
    for key, value in arrays.items():
        for leaf in jax.tree.leaves(value):
            for axis, size in zip(axes[key], leaf.shape, strict=False):
                if axis is not None:
                    sizes.setdefault(axis, set()).add(size)
    layout: dict[str, tuple | None] = {}
    for axis, found in sizes.items():
        common = math.gcd(*(found - {1}))  # 0, divisible by all, when every size is 1
        fitted = _fit(axis, common, mesh)
        wanted = _fit(axis, 0, mesh)
        if axis == "heads" and fitted != wanted:
            raise UserError(
                f"mesh.{'*'.join(wanted)}={_shards(wanted, mesh)} must divide the heads of {op}: "
                f"{', '.join(map(str, sorted(found - {1})))}"
            )
        layout[axis] = fitted if fitted and found != {1} else None
    return layout


def _name(op: Callable) -> str:
    return getattr(op, "__name__", None) or getattr(op, "func", op).__name__
