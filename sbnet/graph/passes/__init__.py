"""Passes: each a function Graph -> Graph. `optimise` runs those that every backend needs, in order."""

from sbnet.graph.ir import Graph
from sbnet.graph.passes.fold import fold_affine, merge_branches
from sbnet.graph.passes.forward import fold_forward
from sbnet.graph.passes.fuse import (
    fuse_activations,
    fuse_pixels,
    fuse_residuals,
    fuse_residuals_after,
    join_slices,
    lower_affine,
    recognise_activations,
)
from sbnet.graph.passes.hard_swish import recognise_hard_swish
from sbnet.graph.passes.pools import recognise_pools
from sbnet.graph.passes.program import write_programs
from sbnet.graph.passes.tokens import pack_patches

PASSES = (
    recognise_hard_swish, fold_affine, merge_branches, fuse_residuals, recognise_activations, fuse_activations,
    fuse_residuals_after, fold_forward, lower_affine, fuse_pixels, join_slices, write_programs, recognise_pools,
    pack_patches,
)  # fmt: skip


def optimise(graph: Graph) -> Graph:
    """Folds and fuses, in place."""
    graph.link()
    for one in PASSES:
        graph = one(graph).link()
    return graph


__all__ = [
    "PASSES",
    "fold_affine",
    "fold_forward",
    "fuse_activations",
    "fuse_pixels",
    "fuse_residuals",
    "fuse_residuals_after",
    "join_slices",
    "lower_affine",
    "merge_branches",
    "optimise",
    "pack_patches",
    "recognise_activations",
    "recognise_hard_swish",
    "recognise_pools",
    "write_programs",
]
