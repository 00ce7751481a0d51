"""Pictures that are larger than memory, read and written by windows."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sbnet import files
from sbnet.apps.pipeline.frames import PipelineError

SLIDES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")
RASTERS = (".vrt", ".jp2", ".img", ".gtiff")
KEPT = 256  # decoded segments of a TIFF file


def _tifffile() -> Any:
    try:
        import tifffile
    except ImportError:
        raise PipelineError("TIFF files need tifffile: pip install 'sbnet[large]'") from None
    return tifffile


class LargeTiff:
    """The first page of a TIFF file, tiled or in strips, as an array [H,W,C] that windows are read of:
    `tiff[a:b, c:d]`. Tiles that the file leaves out hold its nodata value (GDAL's tag), or 0.

    Holds at most KEPT decoded segments.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        tifffile = _tifffile()
        try:
            self._file = tifffile.TiffFile(os.fspath(path))
            self._page = self._file.pages[0]
        except (OSError, ValueError, IndexError) as error:  # tifffile's own error is a ValueError
            raise PipelineError(f"{path}: cannot be read ({error})") from None
        page = self._page
        self._path = path
        if page.axes not in ("YX", "YXS") or page.planarconfig not in (None, 1):
            raise PipelineError(f"{path}: expected rows of pixels of grey or colours, got axes {page.axes}")
        channels = page.shape[2] if page.axes == "YXS" else 1
        self.shape, self.dtype = (*page.shape[:2], channels), page.dtype
        tiled = page.is_tiled
        self._segment = (
            (page.tilelength, page.tilewidth) if tiled else (page.rowsperstrip or self.shape[0], self.shape[1])
        )
        try:
            self.nodata = np.asarray(page.nodata).astype(self.dtype)
        except (ValueError, OverflowError):  # a text that is no number
            self.nodata = np.zeros((), self.dtype)
        self._across = -(-self.shape[1] // self._segment[1])
        self._decoded: OrderedDict[int, np.ndarray] = OrderedDict()

    def _decode(self, index: int) -> np.ndarray:
        found = self._decoded.pop(index, None)
        if found is None:
            page, handle = self._page, self._file.filehandle
            try:
                handle.seek(page.dataoffsets[index])
                data = handle.read(page.databytecounts[index])
                segment = page.decode(data, index, jpegtables=page.jpegtables)[0] if data else None
            except Exception as error:  # codecs raise whatever broken data lead them to
                raise PipelineError(f"{self._path}: tile {index}: cannot be read ({error})") from None
            found = np.full((*self._segment, self.shape[2]), self.nodata) if segment is None else segment[0]
            while len(self._decoded) >= KEPT:
                self._decoded.popitem(last=False)
        self._decoded[index] = found
        return found

    def __getitem__(self, at: tuple[slice, slice]) -> np.ndarray:
        (top, bottom, _), (left, right, _) = (s.indices(n) for s, n in zip(at, self.shape, strict=False))
        high, wide = self._segment
        window = np.zeros((bottom - top, right - left, self.shape[2]), self.dtype)
        for row in range(top // high, -(-bottom // high)):
            for column in range(left // wide, -(-right // wide)):
                segment = self._decode(row * self._across + column)
                y, x = row * high, column * wide
                a, b = max(top, y), min(bottom, y + segment.shape[0])
                c, d = max(left, x), min(right, x + segment.shape[1])
                window[a - top : b - top, c - left : d - left] = segment[a - y : b - y, c - x : d - x]
        return window

    def close(self) -> None:
        self._file.close()


class LargeSlide:
    """A slide that OpenSlide reads, at its finest level, as an array [H,W,3] that windows are read of."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import openslide
        except ImportError:
            raise PipelineError("slides need OpenSlide: pip install 'sbnet[slides]'") from None
        try:
            self._slide = openslide.OpenSlide(os.fspath(path))
        except (openslide.OpenSlideError, OSError) as error:
            raise PipelineError(f"{path}: cannot be read ({error})") from None
        width, height = self._slide.dimensions
        self.shape, self.dtype = (height, width, 3), np.dtype(np.uint8)

    def __getitem__(self, at: tuple[slice, slice]) -> np.ndarray:
        (top, bottom, _), (left, right, _) = (s.indices(n) for s, n in zip(at, self.shape, strict=False))
        found = np.array(self._slide.read_region((left, top), 0, (right - left, bottom - top)))
        opaque = found[..., 3:] > 0  # what was not scanned is transparent: white, as the slide around it
        return np.where(opaque, found[..., :3], np.uint8(255))

    def close(self) -> None:
        self._slide.close()


class LargeRaster:
    """A raster that GDAL reads, through rasterio, as an array [H,W,bands] that windows are read of."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import rasterio
        except ImportError:
            raise PipelineError("rasters need rasterio: pip install 'sbnet[raster]'") from None
        try:
            self._file = rasterio.open(os.fspath(path))
        except (rasterio.errors.RasterioError, OSError) as error:
            raise PipelineError(f"{path}: cannot be read ({error})") from None
        self.shape = self._file.height, self._file.width, self._file.count
        self.dtype = np.dtype(self._file.dtypes[0])

    def __getitem__(self, at: tuple[slice, slice]) -> np.ndarray:
        (top, bottom, _), (left, right, _) = (s.indices(n) for s, n in zip(at, self.shape, strict=False))
        return np.ascontiguousarray(np.moveaxis(self._file.read(window=((top, bottom), (left, right))), 0, 2))

    def close(self) -> None:
        self._file.close()


def open_large(given: Any) -> Any:
    """What windows [H,W,C] are read of: an array, a .npy (mapped), a .tif or .tiff, a slide, a raster."""
    if not isinstance(given, (str, os.PathLike)):
        if getattr(given, "ndim", len(getattr(given, "shape", ()))) != 3:
            raise PipelineError(f"picture: expected an array [H,W,C] or a file, got {type(given).__name__}")
        return given
    path = Path(given)
    if not path.is_file():
        raise PipelineError(f"{path}: no such file")
    if path.suffix.lower() == ".npy":
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise PipelineError(f"{path}: cannot be read ({error})") from None
        return open_large(found if found.ndim == 3 else found[..., None])
    if path.suffix.lower() in (".tif", ".tiff"):
        return LargeTiff(path)
    if path.suffix.lower() in SLIDES:
        return LargeSlide(path)
    if path.suffix.lower() in RASTERS:
        return LargeRaster(path)
    raise PipelineError(f"{path}: expected one of .npy, .tif, .tiff, {', '.join((*SLIDES, *RASTERS))}")


class LargeOutput:
    """[H,W,K] float32 of zeros that windows are written into, in memory (None), or a .npy or .tif that is there once
    it is whole (`sbnet.files.Part`). Written through the file, not through mapped memory: a full disk is an error.

    Raises:
        PipelineError: of all that cannot be written.
    """

    def __init__(self, target: Any, shape: tuple[int, int, int], sources: Sequence[Any] = ()) -> None:
        self.shape = shape
        self._memory = np.zeros(shape, np.float32) if target is None else None
        self._part: files.Part | None = None
        if target is None:
            return
        self._path = path = Path(target)
        suffix = path.suffix.lower()
        if suffix not in (".npy", ".tif", ".tiff"):
            raise PipelineError(f"{path}: expected .npy, .tif or .tiff")
        tifffile = None if suffix == ".npy" else _tifffile()
        self._part = part = files.Part(path, sources, PipelineError)
        try:
            if tifffile is None:
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(part.file, header)
                self._offset = part.file.tell()
                part.file.truncate(self._offset + 4 * math.prod(shape))
            else:
                part.file.close()  # tifffile opens it by its name
                made = tifffile.memmap(os.fspath(part.part), shape=shape, dtype=np.float32, bigtiff=True, metadata=None,
                                       photometric="minisblack", planarconfig="contig")  # fmt: skip
                self._offset = made.offset
                del made
                part.file = part.part.open("r+b", buffering=0)
        except (OSError, ValueError) as error:
            part.drop()
            raise part.failed(error) from None

    def write(self, row: int, column: int, window: np.ndarray) -> None:
        """window: [h,w,K] float32, its corner at (row, column)."""
        if self._part is None:
            assert self._memory is not None
            self._memory[row : row + window.shape[0], column : column + window.shape[1]] = window
            return
        _, width, channels = self.shape
        for k, line in enumerate(np.ascontiguousarray(window, "<f4")):
            at = self._offset + 4 * channels * ((row + k) * width + column)
            data = memoryview(line).cast("B")
            try:
                while data:
                    done = os.pwrite(self._part.file.fileno(), data, at)
                    data, at = data[done:], at + done
            except OSError as error:
                raise self._part.failed(error) from None

    def keep(self) -> np.ndarray:
        """It is whole: the array, of a file mapped."""
        if self._part is None:
            assert self._memory is not None
            return self._memory
        self._part.keep()
        return np.memmap(self._path, np.dtype("<f4"), "r+", self._offset, self.shape)

    def drop(self) -> None:
        """Leaves what was there before."""
        if self._part is not None:
            self._part.drop()


def files_of(given: Any) -> list[Any]:
    """The files that an array or a path reads."""
    found = given if isinstance(given, (str, os.PathLike)) else getattr(given, "filename", None)
    return [] if found is None else [found]
