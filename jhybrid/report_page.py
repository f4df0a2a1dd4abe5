"""The page that routing reports share: one HTML file that loads nothing."""

import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any


def page(
    *,
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    body: str,
    footer: str,
    data: Mapping[str, Any],
) -> str:
    """`facts`: (number, of what). `body` is HTML, everything else text; `data` is kept as JSON."""
    shown = (
        f'<div class="fact"><b>{escaped(number)}</b><span>{escaped(of)}</span></div>'
        for number, of in facts
    )
    parts = {
        "title": escaped(title),
        "lead": escaped(lead),
        "facts": "".join(shown),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "body": body,
        "footer": escaped(footer),
    }
    return fill("report.html", parts)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with its placeholders replaced, in one pass: what a part says stays as it is."""
    text = importlib.resources.files("jhybrid").joinpath(template).read_text(encoding="utf-8")
    head, *rest = text.split("{{")
    return head + "".join(parts[key] + tail for key, tail in (part.split("}}", 1) for part in rest))


def escaped(text: str) -> str:
    return html.escape(text)
