"""The public-domain prose shipped with the package: one novel and sixty years of speeches."""

import functools
import importlib.resources

from jhybrid.data.text import Split, read_documents, split_documents

FILES = ("moby_dick.txt.gz", "state_of_the_union.jsonl.gz")
VALIDATION_FRACTION = 0.05


@functools.cache
def _documents(name: str) -> tuple[str, ...]:
    resource = importlib.resources.files("jhybrid.data.corpus") / name
    with importlib.resources.as_file(resource) as path:
        return tuple(read_documents(path))


def embedded_text(split: Split, validation_fraction: float = VALIDATION_FRACTION) -> list[str]:
    """Documents of one split; validation is the tail of the novel and the last speeches."""
    return [
        text
        for name in FILES
        for text in split_documents(_documents(name), validation_fraction)[split]
    ]
