"""How every config class is made, and the checks their fields share."""

import dataclasses
import math
from typing import TypeVar, dataclass_transform

from jhybrid.errors import UserError

_Config = TypeVar("_Config")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen(config: type[_Config]) -> type[_Config]:
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(config)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def require_positive(owner: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        positive = value is None or 0 < value < math.inf
        require(positive, f"{owner}.{name}={value} must be positive and finite")


def require_multiple(name: str, value: int, of_name: str, of: int) -> None:
    require(of > 0 and value % of == 0, f"{name}={value} must be a multiple of {of_name}={of}")
