"""Files as a disk tier uses them: direct where the file system takes it, whole or an error, in page-aligned memory.

`Files` is the seam to the operating system; tests put one there that fails. `SegmentFile` counts who uses an open
segment, so that one which is deleted stays readable for those who read it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tandem.prefix_store.disk_format import PAGE, Geometry, SegmentPage, pack_segment

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that say that the file system is full, or as good as."""
BAD_MEDIUM = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ})
"""Errors that say that these bytes will not be read again."""


def aligned_memory(num_bytes: int) -> memoryview:
    """Zeroed memory at a page's beginning; it lives as long as a view of it."""
    return memoryview(mmap.mmap(-1, max(num_bytes, PAGE)))[:num_bytes]


def is_aligned(view: memoryview) -> bool:
    """Whether direct IO can use this memory as it is."""
    address, _ = np.frombuffer(view, np.uint8).__array_interface__["data"]
    return address % PAGE == 0 and view.nbytes % PAGE == 0


def skip(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of views after their first `num_bytes`."""
    left = []
    for view in views:
        if num_bytes < view.nbytes:
            left.append(view[num_bytes:])
        num_bytes = max(0, num_bytes - view.nbytes)
    return left


class Files:
    """Opens, reads and writes. Any thread. `direct` is found out by `probe`."""

    def __init__(self) -> None:
        self.direct = False

    def probe(self, directory: Path) -> None:
        """Tries direct IO with a file of one page. Without it, the page cache is used."""
        path = directory / f"probe-{os.getpid()}"
        self.direct = True
        try:
            fd = self.open(path, os.O_CREAT | os.O_TRUNC)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            return
        finally:
            path.unlink(missing_ok=True)
        try:
            page = aligned_memory(PAGE)
            self.write(fd, [page], 0)
            self.direct = self.read(fd, [page], 0) == PAGE
        except OSError as exc:
            if exc.errno != errno.EINVAL and exc.errno not in NO_SPACE:
                raise
            self.direct = exc.errno != errno.EINVAL
        finally:
            os.close(fd)

    def open(self, path: Path, flags: int = 0) -> int:
        """A descriptor for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags | (os.O_DIRECT if self.direct else 0), 0o600)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Takes the space now, so that a full file system is met here and not in the middle of a block."""
        os.posix_fallocate(fd, 0, num_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """One call of the operating system's."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """One call of the operating system's."""
        return os.pwritev(fd, views, offset)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fills views; how many bytes there were before the end of the file. Raises OSError."""
        done, total = 0, sum(view.nbytes for view in views)
        while done < total:
            count = self.preadv(fd, skip(views, done), offset + done)
            if count <= 0:
                break
            if self.direct and count > PAGE:
                count -= count % PAGE  # direct reads go on at a page's beginning
            done += count
            if self.direct and done % PAGE:
                break  # the end of the file
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Writes all of it, in as many calls as it takes. Raises OSError."""
        done, total = 0, sum(view.nbytes for view in views)
        while done < total:
            count = self.pwritev(fd, skip(views, done), offset + done)
            if self.direct:
                count -= count % PAGE
            if count <= 0:
                raise OSError(errno.EIO, f"no progress in a write of {total} bytes after {done}")
            done += count


class SegmentFile:
    """One open segment. Uses are counted by the owner, under its lock; the last one of a deleted segment closes it."""

    def __init__(self, path: Path, fd: int, page: SegmentPage) -> None:
        self.path = path
        self.fd = fd
        self.number = page.number
        self.geometry: Geometry = page.geometry
        self._num_uses = 1

    def acquire(self) -> SegmentFile:
        """One more use."""
        assert self._num_uses > 0, "closed"
        self._num_uses += 1
        return self

    def release(self) -> None:
        """One use less; the owner's own is the last one. Closes the file after the last."""
        self._num_uses -= 1
        if self._num_uses == 0:
            os.close(self.fd)


def segment_path(directory: Path, number: int) -> Path:
    """The file of a segment."""
    return directory / f"segment-{number:012d}.kv"


def create_segment(files: Files, directory: Path, page: SegmentPage) -> SegmentFile:
    """A new file with its space taken and its first page written. Raises OSError, leaving nothing."""
    path = segment_path(directory, page.number)
    fd = files.open(path, os.O_CREAT | os.O_EXCL)
    try:
        files.allocate(fd, page.geometry.file_bytes)
        memory = aligned_memory(PAGE)
        memory[:] = pack_segment(page)
        files.write(fd, [memory], 0)
    except OSError:
        os.close(fd)
        path.unlink()
        raise
    return SegmentFile(path, fd, page)
