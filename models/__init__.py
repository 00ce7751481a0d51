"""Ready networks."""

from sbnet.models.contours import contour_net, paint_contours

__all__ = ["contour_net", "paint_contours"]
