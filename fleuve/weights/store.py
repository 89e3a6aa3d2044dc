"""One version of the weights, written once as a safetensors file, verified by whoever reads it.

The file is written under another name and renamed when it is whole, so a reader sees all of it or nothing. Size,
checksum and version travel beside it in the `WeightFile`: what arrives is what was published, or an error says how it
differs. Any version can be read without those before it: a reader may jump.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleuve.types import WeightFile
from fleuve.weights.directory import claim
from fleuve.weights.stream import write_tensors


class WeightError(RuntimeError):
    """The weights that arrived are not those that were published. Says which file and what differs."""


class WeightStore:
    """The writer's side: publishes versions into `directory`, which it owns, and keeps the newest `keep`."""

    def __init__(self, directory: Path, keep: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.keep = keep
        self._published: dict[int, Path] = {}  # oldest first
        self._lock: int | None = claim(directory)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], served: int | None = None) -> WeightFile:
        """Write one version, and remove the oldest beyond `keep`.

        Args:
            version: of the policy. A version that is already there is replaced.
            tensors: each tied weight once (as `named_parameters` does). Each is written as it comes, and then let go.
            served: the version that the readers have; it and the newer ones, which they may be asked to read, stay.

        Raises:
            OSError: no space left. Nothing remains under the final name.
        """
        path = self.directory / f"weights-{version:08d}.safetensors"
        part = path.with_suffix(".part")
        try:
            write_tensors(part, tensors, {"version": str(version)})
            file = WeightFile(
                version=version, path=str(path), bytes=part.stat().st_size, checksum=_checksum(part)
            )  # computed over what the file system gives back, not over what we meant to write
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            what = f"cannot write the weights of version {version} to {path}: {error.strerror or error}"
            raise OSError(error.errno, what) if error.errno else OSError(what) from error
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._published.pop(version, None)
        self._published[version] = path
        for old, old_path in list(self._published.items())[: -self.keep]:
            if served is None or old < served:
                old_path.unlink(missing_ok=True)
                del self._published[old]
        return file

    def close(self) -> None:
        """Remove the directory and everything in it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_weights(file: WeightFile) -> dict[str, Tensor]:
    """The tensors of a published version, by name, on the CPU.

    Raises:
        WeightError: the file is missing or cannot be read, or its size, checksum or version is not what `file` says.
    """
    path = Path(file.path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise WeightError(f"weights of version {file.version}: {path} is not a file")
        size = found.st_size
        if size != file.bytes:
            raise WeightError(f"weights of version {file.version} in {path}: {size} bytes, published were {file.bytes}")
        if not size:
            raise WeightError(f"weights of version {file.version} in {path}: the file is empty")
        checksum = _checksum(path)
        if checksum != file.checksum:
            raise WeightError(
                f"weights of version {file.version} in {path}: checksum {checksum}, published was {file.checksum}"
            )
        with safe_open(path, framework="pt", device="cpu") as opened:
            version = (opened.metadata() or {}).get("version")
            if version != str(file.version):
                raise WeightError(f"weights in {path} are of version {version}, expected were those of {file.version}")
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise WeightError(
            f"weights of version {file.version}: {path} does not exist (removed after newer versions came?)"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a path that can be none
        raise WeightError(f"weights of version {file.version} in {path}: {error}") from error


def _checksum(path: Path) -> str:
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return f"crc32:{zlib.crc32(content):08x}"
