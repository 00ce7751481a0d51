"""timm's SAM encoder with its relative positions as buffers: as it is, it makes their indices on the host in every call
and copies them to the device, which no CUDA graph holds and which a dense form has not to wait for."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def with_held_positions(net: nn.Module) -> nn.Module:
    """The network, changed in place where it is timm's SAM encoder; another one is left alone.

    Raises:
        ValueError: tables of relative positions that each call would interpolate.
    """
    if type(net).__name__ != "VisionTransformerSAM":
        return net
    sam: Any = importlib.import_module("timm.models.vision_transformer_sam")
    for attention in net.modules():
        if isinstance(attention, sam.Attention) and attention.use_rel_pos:
            if attention.rope is not None or not attention.fused_attn:
                raise ValueError("sbnet bench: SAM: expected fused attention without rotary tables, got another")
            for name in ("h", "w"):
                side = (len(getattr(attention, f"rel_pos_{name}")) + 1) // 2
                at = torch.arange(side, device=attention.rel_pos_h.device)
                attention.register_buffer(f"at_{name}", at[:, None] - at + side - 1, persistent=False)
            attention.__class__ = type("HeldPositions", (sam.Attention,), {"forward": _forward})
    return net


def _forward(self: Any, x: Tensor) -> Tensor:
    """timm's, op by op, with the tables of `at_h` and `at_w`."""
    n, h, w, c = x.shape
    if (h, w) != (len(self.at_h), len(self.at_w)):
        raise ValueError(f"sbnet bench: SAM: expected {len(self.at_h)} x {len(self.at_w)} tokens, got {h} x {w}")
    qkv = self.qkv(x.reshape(n, h * w, c)).view(n, h * w, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.reshape(3, n * self.num_heads, h * w, -1).unbind(0)
    q, k = self.q_norm(q), self.k_norm(k)
    rows = q.reshape(len(q), h, w, -1)
    of_rows = torch.einsum("bhwc,hkc->bhwk", rows, self.rel_pos_h[self.at_h])
    of_columns = torch.einsum("bhwc,wkc->bhwk", rows, self.rel_pos_w[self.at_w])
    bias = (of_rows[:, :, :, :, None] + of_columns[:, :, :, None, :]).reshape(-1, h * w, h * w)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    y = y.view(n, self.num_heads, h * w, -1).transpose(1, 2).reshape(n, h * w, -1)
    return self.proj(y).view(n, h, w, -1)
