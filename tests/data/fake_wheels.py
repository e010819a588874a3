"""Small wheels that pip accepts, and assets made of them."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from chai_eval.data.assets import Asset, Convert

FILENAME = "fake_asset-1.0-py3-none-any.whl"


def write_wheel(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = "fake_asset-1.0.dist-info"
    with zipfile.ZipFile(folder / FILENAME, "w") as archive:
        archive.writestr("fake_asset/text.txt", "content")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-asset\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / FILENAME


def unpack_text(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder / "text.txt").write_bytes(archive.read("fake_asset/text.txt"))


def fake_asset(wheel: Path, *, convert: Convert = unpack_text, sha256: str | None = None) -> Asset:
    return Asset(
        name="fake-1",
        distribution="fake-asset",
        version="1.0",
        filename=FILENAME,
        sha256=sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest(),
        size=wheel.stat().st_size,
        convert=convert,
    )
