"""The kinds of nodes: one class each. This folder is the list; a new kind is a new file."""

import importlib
import pkgutil

from sbnet.graph.kinds.kind import ACTIVE, KINDS, POINTWISE, WHOLE, Context, Given, Kind, Target, kind_of, reads

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["ACTIVE", "KINDS", "POINTWISE", "WHOLE", "Context", "Given", "Kind", "Target", "kind_of", "reads"]
