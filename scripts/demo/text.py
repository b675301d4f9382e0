"""The text: the six novels of Jane Austen, which the Debian package r-cran-janeaustenr ships."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE, VERSION = "r-cran-janeaustenr", "1.0.0-1"
SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
END = "<|endoftext|>"  # between chapters
BLOCK, EVERY = 8192, 32  # of blocks of about BLOCK characters, every EVERY-th is held out
FRONT_MATTER = r"(by )?jane austen.*|by|persuasion|finis"

STRING, STRINGS = 9, 16  # CHARSXP and STRSXP of R's serialization format


def fetch(folder: Path) -> Path:
    """The package in `folder`, downloaded by `apt-get` unless it is there. Raises `ValueError` if it is another one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}_{VERSION}_all.deb"
    if not path.exists():
        command = ["apt-get", "download", f"{PACKAGE}={VERSION}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise ValueError(f"{' '.join(command)} failed (is `apt-get update` due?): {done.stderr.strip()}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has sha256 {found}, expected {SHA256}")
    return path


def novels(package: Path, folder: Path) -> list[str]:
    """The novels in a package, which is unpacked into `folder`: chapters divided by `END`, a paragraph a line."""
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    return [clean(list(_strings(item))) for item in _objects((folder / DATA).read_bytes())]


def split(texts: list[str]) -> tuple[str, str]:
    """What is trained on and what is held out: whole paragraphs."""
    kept: list[str] = []
    held: list[str] = []
    for i, block in enumerate(block for text in texts for block in _blocks(text)):
        (held if i % EVERY == EVERY - 1 else kept).append(block)
    return "".join(kept), "".join(held).replace(f"{END}\n", "")


def clean(lines: list[str]) -> str:
    """Prose only: a paragraph a line, `END` in place of headings, no marks of emphasis and no notes."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines))
    kept: list[str] = []
    for paragraph in (re.sub(r"\s+", " ", text).strip() for text in paragraphs):
        if re.search("thoroughly revised|first edition, published", paragraph):
            break  # a note of the edition, after the end
        if re.fullmatch(r"(chapter|volume) \w+\.?", paragraph, re.IGNORECASE):
            if kept and kept[-1] != END:
                kept.append(END)
        elif re.search("[a-z]{2}", paragraph) and not re.fullmatch(FRONT_MATTER, paragraph, re.I):
            kept.append(paragraph.replace("_", "").replace("`", "'"))
    return "\n".join([*kept, END, ""])


def _blocks(text: str) -> Iterator[str]:
    """Cut after paragraphs, `BLOCK` characters or a little more each."""
    block = ""
    for line in text.splitlines(keepends=True):
        block += line
        if len(block) >= BLOCK:
            yield block
            block = ""
    if block:
        yield block


def _objects(data: bytes) -> Iterator[bytes]:
    """The objects of an R lazy-load database: each a length in four bytes and a zlib stream."""
    while data:
        stream = zlib.decompressobj()
        item = stream.decompress(data[4:])
        if len(item) != int.from_bytes(data[:4], "big"):
            raise ValueError(f"{DATA} is damaged")
        yield item
        data = stream.unused_data


def _strings(item: bytes) -> Iterator[str]:
    """A character vector in R's serialization format (XDR, version 2 or 3)."""
    (version,) = struct.unpack_from(">i", item, 2)
    at = 14 if version < 3 else 18 + struct.unpack_from(">i", item, 14)[0]  # version 3 names the encoding
    kind, count = struct.unpack_from(">ii", item, at)
    if item[:2] != b"X\n" or kind & 255 != STRINGS:
        raise ValueError(f"{DATA} holds something else than lines of text")
    at += 8
    for _ in range(count):
        kind, length = struct.unpack_from(">ii", item, at)
        if kind & 255 != STRING or length < 0:
            raise ValueError(f"{DATA} holds something else than lines of text")
        yield item[at + 8 : at + 8 + length].decode()
        at += 8 + length
