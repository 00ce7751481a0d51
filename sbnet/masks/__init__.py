"""Where masks come from."""

from sbnet.masks.base import Mask, Still, as_mask
from sbnet.masks.codec import Codec
from sbnet.masks.files import Recorded
from sbnet.masks.grow import grow
from sbnet.masks.lidar import BirdsEye, read_points
from sbnet.masks.motion import Changed, MotionMask, Refresh
from sbnet.masks.named import open_mask
from sbnet.masks.pixels import Alpha, Ink, Nodata, Occupied, Thumbnail, Tissue, everything, otsu
from sbnet.masks.shapes import Boxes, Polygons, Tracks, fill_boxes, fill_polygons

__all__ = [
    "Alpha",
    "BirdsEye",
    "Boxes",
    "Changed",
    "Codec",
    "Ink",
    "Mask",
    "MotionMask",
    "Nodata",
    "Occupied",
    "Polygons",
    "Recorded",
    "Refresh",
    "Still",
    "Thumbnail",
    "Tissue",
    "Tracks",
    "as_mask",
    "everything",
    "fill_boxes",
    "fill_polygons",
    "grow",
    "open_mask",
    "otsu",
    "read_points",
]
