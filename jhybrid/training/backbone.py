"""Starting from a checkpoint's parameters: what a run adds to them are routers of heads."""

import dataclasses
from collections.abc import Mapping

import jax

from jhybrid.checkpoint import StoredParameters, differing_fields
from jhybrid.config import HeadRoutedConfig, ModelConfig
from jhybrid.errors import UserError

# What decides a model's function, up to rounding.
DECIDING = ("vocab_size", "dim", "blocks", "tied_head", "embed_norm", "norm_eps")


class Backbone:
    """The parameters of a workdir or an export for a model that may add routers of heads.

    UserError unless `model` is the stored model once the routers of both are left out.
    """

    def __init__(self, path: str, model: ModelConfig, places: Mapping[str, jax.ShapeDtypeStruct]):
        self._stored = StoredParameters(path)
        self._places = places
        saved = without_routers(self._stored.experiment.model)
        differing = differing_fields(without_routers(model), saved)
        fields = [field for field in differing if field.startswith(DECIDING)]
        lost = [
            name
            for name, spec in self._stored.specs.items()
            if name not in places or places[name].shape != spec.shape
        ]
        if fields or lost:
            what = "; ".join(fields[:5]) or f"parameter {lost[0]} has no place in this one"
            raise UserError(f"training.init_from={path} holds another model: {what}")

    def read(self) -> dict[str, jax.Array]:
        """By path, with the dtype and sharding of `places`; the host holds one at a time."""
        read = {}
        for name in self._stored.specs:
            place = self._places[name]
            value = self._stored.read(name).astype(place.dtype)
            read[name] = jax.device_put(value, place.sharding)
        return read


def without_routers(model: ModelConfig) -> ModelConfig:
    """The model whose heads all attend fully."""
    blocks = tuple(
        dataclasses.replace(block, mixer=block.mixer.attention)
        if isinstance(block.mixer, HeadRoutedConfig)
        else block
        for block in model.blocks
    )
    return dataclasses.replace(model, blocks=blocks)
