"""Configs to and from JSON, and "a.b=c" overrides, driven by the type annotations alone."""

import ast
import dataclasses
import json
import types
import typing
from typing import Any, Literal, Union

from jhybrid.config import Experiment, require
from jhybrid.errors import UserError


def to_json(config: Any, *, indent: int | None = 2) -> str:
    return json.dumps(_encode(config), indent=indent)


def from_json(text: str) -> Experiment:
    """Rebuilds an Experiment; unknown and missing fields are errors."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"config: not valid JSON ({error})") from None
    return _decode(data, Experiment, "config")


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _describe(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind).replace("typing.", "")


def _decode(value: Any, kind: Any, path: str) -> Any:
    """Checks `value` (JSON or Python literals) against annotation `kind` and builds it."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        require(
            value in typing.get_args(kind),
            f"{path}={value!r}: choose one of {typing.get_args(kind)}",
        )
        return value
    if origin in (Union, types.UnionType):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        options = [o for o in options if o is not type(None)]
        if isinstance(value, dict):
            by_name = {o.__name__: o for o in options if dataclasses.is_dataclass(o)}
            name = value.get("kind")
            require(name in by_name, f"{path}.kind={name!r}: choose one of {sorted(by_name)}")
            return _decode(value, by_name[name], path)
        if any(value.__class__ is o for o in options):
            return value
        require(
            len(options) == 1,
            f"{path}={value!r}: expected one of {[_describe(o) for o in options]}",
        )
        return _decode(value, options[0], path)
    if origin is tuple:
        require(isinstance(value, (list, tuple)), f"{path}={value!r}: expected a list")
        return tuple(
            _decode(v, typing.get_args(kind)[0], f"{path}.{i}") for i, v in enumerate(value)
        )
    if dataclasses.is_dataclass(kind):
        if isinstance(value, kind):
            return value
        require(isinstance(value, dict), f"{path}={value!r}: expected {_describe(kind)}")
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints) - {"kind"}
        require(
            not unknown,
            f"{path}: unknown field {', '.join(sorted(unknown))}; known: {', '.join(hints)}",
        )
        built = {
            name: _decode(item, hints[name], f"{path}.{name}")
            for name, item in value.items()
            if name != "kind"
        }
        try:
            return kind(**built)
        except TypeError as error:
            raise UserError(f"{path}: {error}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(value.__class__ is kind, f"{path}={value!r}: expected {_describe(kind)}")
    return value


def override(config: Experiment, assignment: str) -> Experiment:
    """Applies "a.b=c". List items go by index or `*` (`model.blocks.*.mixer.chunk_size`)."""
    path, equals, text = assignment.partition("=")
    require(bool(equals), f"--set {assignment!r}: expected path=value")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return _override(config, path.strip().split("."), value, Experiment, "")


def _override(node: Any, path: list[str], value: Any, kind: Any, where: str) -> Any:
    if not path:
        return _decode(value, kind, where)
    head, rest = path[0], path[1:]
    here = f"{where}.{head}".lstrip(".")
    if isinstance(node, tuple):
        item_kind = typing.get_args(kind)[0]
        require(
            head == "*" or (head.isdigit() and int(head) < len(node)),
            f"{here}: expected an index below {len(node)} or *",
        )
        chosen = range(len(node)) if head == "*" else [int(head)]
        return tuple(
            _override(item, rest, value, item_kind, here) if i in chosen else item
            for i, item in enumerate(node)
        )
    require(dataclasses.is_dataclass(node), f"{where} has no field {head!r}")
    hints = typing.get_type_hints(type(node))
    require(head in hints, f"{here}: unknown field; known: {', '.join(hints)}")
    return dataclasses.replace(
        node, **{head: _override(getattr(node, head), rest, value, hints[head], here)}
    )
