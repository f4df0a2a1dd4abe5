"""Configs to and from JSON, and "a.b=c" overrides, driven by the type annotations alone."""

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, Union

from jhybrid.config import Experiment, require
from jhybrid.errors import UserError


def to_json(config: Any) -> str:
    """Any config object as JSON; each nested config carries its class name as `kind`."""
    return json.dumps(_encode(config), indent=2)


def from_json(text: str) -> Experiment:
    """Rebuilds an Experiment. Unknown or missing fields and wrong types raise UserError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"config: not valid JSON ({error})") from None
    return _decode(data, Experiment, "")


def override(experiment: Experiment, assignments: Sequence[str]) -> Experiment:
    """Applies "a.b=c" assignments in order, then validates once.

    List items go by index, or `*` for all of them that have the field, at least one:
    `model.blocks.*.mixer.chunk_size=128`.
    """
    tree = _encode(experiment)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        require(bool(equals), f"--set {assignment!r}: expected path=value")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        _assign(tree, path.strip().split("."), value, "")
    return _decode(tree, Experiment, "")


def _assign(node: Any, path: list[str], value: Any, where: str) -> None:
    key, rest = path[0], path[1:]
    here = _join(where, key)
    if isinstance(node, list):
        known = key == "*" or (key.isdigit() and int(key) < len(node))
        require(known, f"{here}: expected * or an index below {len(node)}")
        keys: Sequence[Any] = [int(key)] if key != "*" else _having(node, rest)
    else:
        require(isinstance(node, dict), f"{here}: {where} has no fields")
        fields = [name for name in node if name != "kind"]
        require(key in fields, f"{here}: unknown field; known: {', '.join(fields)}")
        keys = [key]
    for each in keys:
        if rest:
            _assign(node[each], rest, value, _join(where, each))
        else:
            node[each] = value


def _having(items: list[Any], path: list[str]) -> Sequence[int]:
    """Indices of the items in which `path` can be followed; all of them if none is such an item."""

    def has(node: Any, path: list[str]) -> bool:
        if not path or isinstance(node, list):
            return True
        return isinstance(node, dict) and path[0] in node and has(node[path[0]], path[1:])

    found = [i for i, item in enumerate(items) if has(item, path)]
    return found or range(len(items))


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any, kind: Any, path: str) -> Any:
    """Builds annotation `kind` from JSON or Python literals, checking every type on the way."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        require(value in arguments, f"{path}={value!r}: choose one of {arguments}")
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(value, arguments, path)
    if origin is tuple:
        require(isinstance(value, (list, tuple)), f"{path}={value!r}: expected a list")
        return tuple(_decode(v, arguments[0], _join(path, i)) for i, v in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _decode_config(value, kind, path)
    if kind is float and type(value) is int:
        return float(value)
    require(type(value) is kind, f"{path}={value!r}: expected {kind.__name__}")
    return value


def _decode_union(value: Any, options: Sequence[Any], path: str) -> Any:
    """None if allowed, a config chosen by `kind`, or the one plain type of an optional field."""
    if value is None and type(None) in options:
        return None
    options = [option for option in options if option is not type(None)]
    if len(options) == 1 and not isinstance(value, dict):
        return _decode(value, options[0], path)
    by_name = {option.__name__: option for option in options}
    name = value.get("kind") if isinstance(value, dict) else None
    require(name in by_name, f"{path}: expected one of {', '.join(by_name)}, got {value!r}")
    return _decode(value, by_name[name], path)


def _decode_config(value: Any, kind: Any, path: str) -> Any:
    require(isinstance(value, dict), f"{path or 'config'}={value!r}: expected {kind.__name__}")
    hints = typing.get_type_hints(kind)
    given = {name: item for name, item in value.items() if name != "kind"}
    unknown = sorted(set(given) - set(hints))
    require(
        not unknown,
        f"{path or 'config'}: unknown field {', '.join(unknown)}; known: {', '.join(hints)}",
    )
    fields = {name: _decode(item, hints[name], _join(path, name)) for name, item in given.items()}
    try:
        return kind(**fields)
    except UserError as error:  # its own checks know the last name of the path only
        owner = path.rpartition(".")[2]
        message = str(error)
        if "." in path and message.startswith(f"{owner}."):
            message = path + message.removeprefix(owner)
        raise UserError(message) from None
    except TypeError as error:  # a missing field
        raise UserError(f"{path or 'config'}: {error}") from None


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
