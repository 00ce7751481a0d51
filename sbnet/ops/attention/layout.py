"""Which keys a query attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from sbnet import _library  # noqa: F401  (registers torch.ops.sbnet)
from sbnet.ops.attention import patterns
from sbnet.ops.attention.rule import NO_BAND, AttentionRule, check_block_size, make_rule, positive
from sbnet.ops.common import constant_in_traces


class LayoutTensors(NamedTuple):
    """What ops take of a layout: see core/attention/layout.h. None for all: every block."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    mask_index: Tensor | None = None
    masks: Tensor | None = None


class AttentionLayout:
    """Blocks of the matrix of queries x keys that attention computes, and which elements of them count.

    Immutable and hashable; picklable; a constant for torch.compile and torch.export, but for those of `from_tensor`,
    which hold tensors and are pytrees. Positions of a block that is not in the layout are neither computed nor in the
    softmax. Made by the class methods:

    `causal()`, `local(l)`, `strided(l)`, `dense()` are rules, for any length and number of heads. `fixed(l, ...)` and
    unions are made for a length and a number of heads at first use. `from_blocks`, `from_callback`, `from_mask` hold
    blocks for one length. `from_tensor` holds a mask that lives on the device and may change at every step.

    >>> layout = sbnet.AttentionLayout.union(sbnet.AttentionLayout.local(128), sbnet.AttentionLayout.strided(128))
    >>> q = k = v = torch.rand(1, 2, 512, 16)
    >>> sbnet.block_attention(q, k, v, layout).shape
    torch.Size([1, 2, 512, 16])
    """

    rule: AttentionRule
    block_size: int
    _blocks: Tensor | None  # [1 or heads, Q, K] bool
    _mask_index: Tensor | None
    _masks: Tensor | None
    _pattern: tuple | None  # "fixed" or "union", and its parts
    _visible: Tensor | None
    _on: dict[tuple, tuple[Tensor | None, ...]]

    def __init__(self) -> None:
        raise TypeError("AttentionLayout: expected one of its class methods: causal, local, from_blocks, ...")

    # ---- rules

    @classmethod
    def dense(cls) -> AttentionLayout:
        """Every key."""
        return cls._of(AttentionRule())

    @classmethod
    def causal(cls, diagonal: int = 0, prefix: int = 0) -> AttentionLayout:
        """Keys k <= q + diagonal, and the first `prefix` ones."""
        return cls._of(AttentionRule(diagonal, prefix=prefix))

    @classmethod
    def local(cls, l: int) -> AttentionLayout:  # noqa: E741  (the paper's name)
        """The last l keys up to the query: k <= q and q - k < l."""
        return cls._of(AttentionRule(0, positive("local", "l", l)))

    @classmethod
    def strided(cls, l: int) -> AttentionLayout:  # noqa: E741
        """k <= q and (q - k) % l == 0, at 1/l of the cost of dense attention. Lengths are multiples of l."""
        return cls._of(AttentionRule(0, phases=positive("strided", "l", l)))

    # ---- made for a length at first use

    @classmethod
    def fixed(cls, l: int, num_verts: int = 1, vertsize: int = 1, block_size: int = 32) -> AttentionLayout:  # noqa: E741
        """The keys of the query's own chunk of l, and of every earlier chunk a few blocks ("verticals"): the last
        `vertsize` ones for head 0, those before them for head 1, and so on for `num_verts` groups of heads.

        Sparse Transformers (arXiv 1904.10509), `fixed`; causal. Lengths are multiples of block_size, heads
        of num_verts.
        """
        for name, value in (("l", l), ("num_verts", num_verts), ("vertsize", vertsize)):
            positive("fixed", name, value)
        check_block_size(block_size)
        patterns.check_fixed(l, num_verts, vertsize, block_size)
        return cls._of(AttentionRule(0), block_size, pattern=("fixed", l, num_verts, vertsize))

    @classmethod
    def union(cls, *layouts: AttentionLayout) -> AttentionLayout:
        """Keys that one of the layouts shows. `local(a)` with `strided(b)` is a rule (the paper's merged head)."""
        if not layouts or not all(isinstance(a, AttentionLayout) for a in layouts):
            raise TypeError("AttentionLayout.union: expected layouts")
        if any(isinstance(a, DeviceAttentionLayout) for a in layouts):
            raise ValueError("AttentionLayout.union: expected layouts that are known on the host, got one of a tensor")
        if len(layouts) == 1:
            return layouts[0]
        merged = _merged_rule(layouts)
        if merged is not None:
            return cls._of(merged)
        sizes = [a.block_size for a in layouts if a.has_blocks]
        return cls._of(AttentionRule(), min(sizes, default=64), pattern=("union", *layouts))

    # ---- blocks

    @classmethod
    def from_blocks(
        cls,
        blocks: Any,
        block_size: int,
        causal: bool = False,
        *,
        diagonal: int = 0,
        band: int | None = None,
        prefix: int = 0,
    ) -> AttentionLayout:
        """[Q, K] or [heads, Q, K] of 0 and 1 (anything torch.as_tensor takes), in blocks of 8, 16, 32, 64 or 128.

        Args:
            causal: within blocks, only keys k <= q + diagonal; `band`: of them only the last `band`; `prefix`: the
                first keys of all, to every query.
        """
        check_block_size(block_size)
        mask = torch.as_tensor(blocks).detach().cpu()
        if mask.dim() == 2:
            mask = mask[None]
        if mask.dim() != 3 or not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(
                f"AttentionLayout.from_blocks: blocks: expected [Q, K] or [heads, Q, K] of 0 and 1, got "
                f"{tuple(mask.shape)}"
            )
        return cls._of(make_rule(causal, diagonal, band, prefix), int(block_size), blocks=mask.bool())

    @classmethod
    def from_callback(
        cls,
        mask: Callable[[int, int, int], Any],
        blocks: Any,
        block_size: int,
        causal: bool = False,
        *,
        diagonal: int = 0,
        band: int | None = None,
        prefix: int = 0,
    ) -> AttentionLayout:
        """As `from_blocks`; `mask(head, q_block, k_block)` gives the visible elements of each block, [bs, bs] bool.

        It is called once for each active block, now. Equal blocks are stored once.
        """
        layout = cls.from_blocks(blocks, block_size, causal, diagonal=diagonal, band=band, prefix=prefix)
        assert layout._blocks is not None
        layout._blocks, layout._mask_index, layout._masks = patterns.element_masks(mask, layout._blocks, block_size)
        return layout

    @classmethod
    def from_mask(cls, mask: Any, block_size: int = 64) -> AttentionLayout:
        """[Q, K] or [heads, Q, K] of queries x keys: the blocks that hold a 1, with element masks."""
        check_block_size(block_size)
        mask = torch.as_tensor(mask).detach().cpu()
        mask = mask[None] if mask.dim() == 2 else mask
        if mask.dim() != 3:
            raise ValueError(f"AttentionLayout.from_mask: mask: expected 2 or 3 dimensions, got {mask.dim()}")
        tiles = patterns.split(mask.bool(), block_size)
        return cls.from_callback(lambda h, i, j: tiles[h, i, j], tiles.any(-1).any(-1), block_size)

    @classmethod
    def from_tensor(
        cls,
        blocks: Tensor,
        block_size: int = 64,
        causal: bool = False,
        *,
        diagonal: int = 0,
        band: int | None = None,
        prefix: int = 0,
    ) -> AttentionLayout:
        """A mask on the device: [B, H, Q, K] bool, B and H 1 or those of q. One launch, no synchronisation.

        In a CUDA graph the layout follows the mask's values at each replay. A pytree.
        """
        if not isinstance(blocks, Tensor) or blocks.dim() != 4 or blocks.dtype != torch.bool:
            raise ValueError("AttentionLayout.from_tensor: blocks: expected a bool tensor [B, H, Q, K]")
        check_block_size(block_size)
        rows, columns = torch.ops.sbnet.pack_attention_blocks(blocks)
        return DeviceAttentionLayout(make_rule(causal, diagonal, band, prefix), int(block_size), rows, columns)

    # ---- what a layout is

    @property
    def has_blocks(self) -> bool:
        """Are there blocks that are left out (or, for a pattern, may there be)?"""
        return self._blocks is not None or self._pattern is not None

    @property
    def numbers(self) -> list[int]:
        """The six numbers that ops take."""
        return [*self.rule, self.block_size]

    @property
    def held(self) -> Sequence[int] | None:
        """Heads (1: any), blocks of queries and blocks of keys that it holds; None: it is for any length."""
        return None if self._blocks is None else self._blocks.shape

    def tensors(self, device: torch.device, heads: int, q_length: int, k_length: int) -> LayoutTensors:
        """What ops take of it, on a device."""
        if not self.has_blocks:
            return LayoutTensors()
        # As a constant: tracing looks neither into the tensors nor into which devices have them. A pattern's program is
        # for one length; len(range(n)) is what makes a number of n where tracing has a symbol.
        sizes = [len(range(n)) for n in (heads, q_length, k_length)] if self._pattern is not None else [0, 0, 0]
        return LayoutTensors(*self._tensors_on(str(device), *sizes))

    def visible(self, heads: int, q_length: int, k_length: int) -> Tensor:
        """[1 or heads, q_length, k_length] bool on the CPU: which query sees which key."""
        layout = self._resolve(heads, q_length, k_length)
        if layout is not self and layout._visible is not None:
            return layout._visible
        mask = patterns.rule_mask(layout.rule, q_length, k_length)[None]
        if layout._blocks is None:
            return mask
        tiles = layout._blocks[..., None, None].expand(-1, -1, -1, layout.block_size, layout.block_size)
        if layout._mask_index is not None:
            assert layout._masks is not None
            tiles = tiles & patterns.unpacked(layout._mask_index, layout._masks, layout.block_size)
        return mask & patterns.join(tiles)[:, :q_length, :k_length]

    @constant_in_traces
    def _tensors_on(self, device: str, heads: int, q_length: int, k_length: int) -> tuple[Tensor | None, ...]:
        key = device, heads, q_length, k_length
        if key not in self._on:
            with _disable_current_modes():
                layout = self._resolve(heads, q_length, k_length)
                assert layout._blocks is not None
                packed = torch.ops.sbnet.pack_attention_blocks(layout._blocks[None])
                parts = *packed, layout._mask_index, layout._masks
                self._on[key] = tuple(None if t is None else t.to(device) for t in parts)
        return self._on[key]

    def _resolve(self, heads: int, q_length: int, k_length: int) -> AttentionLayout:
        """Itself, or for a pattern the layout with the blocks of such a problem."""
        if self._pattern is None:
            return self
        kind, *parts = self._pattern
        if kind == "fixed":
            width, num_verts, vertsize = parts
            sizes = heads, q_length, k_length
            blocks = patterns.fixed_blocks(width, num_verts, vertsize, self.block_size, *sizes)
            return AttentionLayout._of(self.rule, self.block_size, blocks=blocks)
        dense = [a.visible(heads, q_length, k_length) for a in parts]
        size = max(len(d) for d in dense)
        mask = torch.stack([d.expand(size, -1, -1) for d in dense]).any(0)
        layout = AttentionLayout.from_mask(mask, self.block_size)
        layout._visible = mask
        return layout

    @classmethod
    def _of(
        cls,
        rule: AttentionRule,
        block_size: int = 64,
        *,
        blocks: Tensor | None = None,
        mask_index: Tensor | None = None,
        masks: Tensor | None = None,
        pattern: tuple | None = None,
    ) -> AttentionLayout:
        self = object.__new__(AttentionLayout)
        self.rule, self.block_size = AttentionRule(*(int(v) for v in rule)), block_size
        self._blocks, self._mask_index, self._masks, self._pattern = blocks, mask_index, masks, pattern
        self._visible, self._on = None, {}
        return self

    def _key(self) -> tuple:
        tensors = (self._blocks, self._mask_index, self._masks)
        bits = tuple(None if t is None else (tuple(t.shape), t.numpy().tobytes()) for t in tensors)
        return self.rule, self.block_size, self._pattern, bits

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionLayout):
            return NotImplemented
        return self is other or (type(self) is type(other) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        rule = ", ".join(f"{n}={v}" for n, v in zip(self.rule._fields, self.rule, strict=True) if v != _DEFAULTS[n])
        if self._pattern is not None:
            what = f"{self._pattern[0]}{self._pattern[1:]}"
        elif self._blocks is not None:
            heads, rows, columns = self._blocks.shape
            what = f"{heads} x {rows} x {columns} blocks of {self.block_size}, {int(self._blocks.sum())} active"
        else:
            what = "all blocks"
        return f"AttentionLayout({what}{', ' if rule else ''}{rule})"

    def __reduce__(self) -> tuple:
        tensors = (self._blocks, self._mask_index, self._masks)
        return _restore, (tuple(self.rule), self.block_size, *(_array(t) for t in tensors), self._pattern)

    def __deepcopy__(self, memo: dict) -> AttentionLayout:
        return self


_DEFAULTS = AttentionRule()._asdict()


class DeviceAttentionLayout(AttentionLayout):
    """What AttentionLayout.from_tensor makes: bitmaps on a device. A pytree of them."""

    def __init__(self, rule: AttentionRule, block_size: int, rows: Tensor, columns: Tensor) -> None:
        self.rule, self.block_size, self.rows, self.columns = rule, block_size, rows, columns

    @property
    def has_blocks(self) -> bool:
        return True

    @property
    def held(self) -> Sequence[int]:
        return self.rows.shape[1], self.rows.shape[2], self.columns.shape[2]

    def tensors(self, device: torch.device, heads: int, q_length: int, k_length: int) -> LayoutTensors:
        return LayoutTensors(self.rows, self.columns)

    def visible(self, heads: int, q_length: int, k_length: int) -> Tensor:
        """[B, 1 or heads, q_length, k_length] bool on the CPU. Reads the device."""
        words = self.rows.cpu()
        bits = (words[..., None] >> torch.arange(32, dtype=torch.int32) & 1).bool().flatten(-2)
        tiles = bits[..., : self.columns.shape[2]].repeat_interleave(self.block_size, -1)
        tiles = tiles.repeat_interleave(self.block_size, -2)[..., :q_length, :k_length]
        return tiles & patterns.rule_mask(self.rule, q_length, k_length)

    def _resolve(self, heads: int, q_length: int, k_length: int) -> AttentionLayout:
        return self

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"AttentionLayout(blocks of {self.block_size} in a tensor, {self.rule})"

    def __reduce__(self) -> tuple:
        return DeviceAttentionLayout, (self.rule, self.block_size, self.rows, self.columns)

    def __deepcopy__(self, memo: dict) -> DeviceAttentionLayout:
        return DeviceAttentionLayout(self.rule, self.block_size, self.rows.clone(), self.columns.clone())


def _merged_rule(layouts: tuple[AttentionLayout, ...]) -> AttentionRule | None:
    if len(layouts) != 2 or any(a.has_blocks for a in layouts):
        return None
    local, strided = sorted((a.rule for a in layouts), key=lambda r: r.phases)
    if local == AttentionRule(0, local.band) and strided == AttentionRule(0, phases=strided.phases):
        return AttentionRule(0, local.band, stride=strided.phases) if local.band != NO_BAND else local
    return None


def _array(t: Tensor | None) -> Any:
    return None if t is None else t.numpy()


def _restore(rule: tuple, block_size: int, blocks: Any, mask_index: Any, masks: Any, pattern: Any) -> AttentionLayout:
    tensors = [None if a is None else torch.from_numpy(a) for a in (blocks, mask_index, masks)]
    names = ("blocks", "mask_index", "masks")
    return AttentionLayout._of(
        AttentionRule(*rule), block_size, pattern=pattern, **dict(zip(names, tensors, strict=True))
    )


_pytree.register_constant(AttentionLayout)
_pytree.register_pytree_node(
    DeviceAttentionLayout,
    lambda a: ([a.rows, a.columns], (a.rule, a.block_size)),
    lambda children, context: DeviceAttentionLayout(*context, *children),
    serialized_type_name="sbnet.DeviceAttentionLayout",
    to_dumpable_context=lambda context: [list(context[0]), context[1]],
    from_dumpable_context=lambda context: (AttentionRule(*context[0]), context[1]),
)


@torch.library.register_fake("sbnet::pack_attention_blocks")
def _pack_fake(blocks: Tensor) -> tuple[Tensor, Tensor]:
    b, h, q, k = blocks.shape
    return (
        blocks.new_empty((b, h, q, (k + 31) // 32), dtype=torch.int32),
        blocks.new_empty((b, h, k, (q + 31) // 32), dtype=torch.int32),
    )
