"""Cases of window_attention_, and what each gives: every window by itself in plain PyTorch."""

import torch

from sbnet import BlockGrid
from sbnet.ops.attention.window_attention import window_attention_
from sbnet.ops.masked.token_rows import pack_tokens
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, poison, random_active


def squares(height: int, width: int, side: int, shift: int = 0, pad: int = 0) -> torch.Tensor:
    """[windows,rows]: pixels from 1 on of square windows of a plane, rolled by `shift`, with `pad` columns of none."""
    plane = torch.arange(1, height * width + 1).view(height, width).roll((-shift, -shift), (0, 1))
    plane = torch.nn.functional.pad(plane, (0, pad))
    windows = plane.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
    return windows.reshape(-1, side**2)


FLOATING = "bias", "row_table", "column_table", "scales", "k_fill", "v_fill"


class Case:
    """heads of `dim` and `value_dim` channels of one tensor, NaN where nothing is active."""

    def __init__(self, device, dtype, size, rows, heads=2, dim=32, value_dim=None, density=0.4, batch=2, **options):
        self.call = window_attention_
        self.heads, self.dim, self.value_dim = heads, dim, value_dim or dim
        self.rows, self.keys, self.size = rows, options.pop("keys", rows), size
        grid = BlockGrid.cover(size, options.pop("block", 4))
        self.active = random_active(grid, batch, density, device)
        self.mask = self.active.pixel_mask(size)
        c = heads * dim

        def plane(channels, size, mask):
            x = torch.randn(batch, channels, *size, device=device)
            x = torch.where(mask, x, torch.nan).to(dtype)
            return x.contiguous(memory_format=torch.channels_last)

        q_start, k_start, v_start = 8, 8 + c, 16 + 2 * c
        self.starts = (q_start, k_start, v_start)
        self.q = self.k = self.v = plane(v_start + heads * self.value_dim, size, self.mask)
        self.key_mask = self.mask
        other = options.pop("other", None)  # keys and values are of this plane
        if other:
            self.key_mask = torch.rand(batch, 1, *other, device=device) < 0.5
            self.k = self.v = plane(v_start + heads * self.value_dim, other, self.key_mask)
            options["active_keys"] = self.key_mask.flatten(1)
        if options.pop("listed", False):  # of one window of all pixels
            packed = pack_tokens(self.active, size)
            options |= {f"{k}_{name}": getattr(packed, name) for k in ("row", "key") for name in ("order", "lengths")}
        self.options = {
            name: t.to(device, dtype if t.is_floating_point() else t.dtype) if isinstance(t, torch.Tensor) else t
            for name, t in options.items()
        }
        self.out = poison((batch, heads * self.value_dim, *size), dtype, device, "channels_last")
        self.device = device

    def run(self):
        before = self.out.clone()
        with torch.no_grad():
            self.call(
                self.q, self.k, self.v, self.rows.to(self.device), self.keys.to(self.device), self.active, self.out,
                starts=self.starts, heads=self.heads, dim=self.dim, value_dim=self.value_dim, scale=0.3,
                **self.options,
            )  # fmt: skip
        kept = ~self.mask.expand_as(self.out)
        assert_bitwise(self.out[kept], before[kept], "inactive pixels")
        return torch.where(self.mask, self.out, 0)

    def reference(self, dtype):
        """One window after the other, of rows and keys that are there."""
        o = {name: t.to(dtype) if name in FLOATING else t for name, t in self.options.items()}
        out = torch.zeros(self.out.shape, dtype=dtype, device=self.device)
        planes = [t.to(dtype).permute(0, 2, 3, 1).flatten(1, 2) for t in (self.q, self.k, self.v)]
        widths = [self.heads * self.dim] * 2 + [self.heads * self.value_dim]
        q, k, v = (t[:, :, start : start + w] for t, start, w in zip(planes, self.starts, widths, strict=True))
        for n, w in [(n, w) for n in range(len(q)) for w in range(len(self.rows))]:
            rows, keys = self.rows[w].to(self.device), self.keys[w].to(self.device)
            places = ((rows > 0) & self.mask[n].flatten()[(rows - 1).clamp(min=0)]).nonzero()[:, 0]
            others = ((keys == 0) | self.key_mask[n].flatten()[(keys - 1).clamp(min=0)]).nonzero()[:, 0]
            if not len(places) or not len(others):
                continue
            pixels, seen = rows[places] - 1, keys[others]
            fills = [o.get(f"{name}_fill", torch.zeros_like(t[0, 0])) for name, t in (("k", k), ("v", v))]
            own_k, own_v = (
                torch.where(seen[:, None] > 0, t[n, (seen - 1).clamp(min=0)], fill)
                for t, fill in zip((k, v), fills, strict=True)
            )
            heads = [t.unflatten(1, (self.heads, -1)).transpose(0, 1) for t in (q[n, pixels], own_k, own_v)]
            raw = heads[0]
            if o.get("normalize"):
                heads[:2] = [torch.nn.functional.normalize(t, dim=-1, eps=o["normalize"]) for t in heads[:2]]
            scores = heads[0] @ heads[1].transpose(1, 2) * 0.3
            if "scales" in o:
                scores = scores * o["scales"].view(-1, 1, 1)
            if "bias" in o:
                bias = o["bias"][w if len(o["bias"]) > 1 else 0]
                scores = scores + bias[:, places][:, :, others]
            if "row_table" in o:
                wide = len(o["column_table"])
                of_rows = torch.einsum("hqc,qkc->hqk", raw, o["row_table"][places // wide])[:, :, others // wide]
                of_columns = torch.einsum("hqc,qkc->hqk", raw, o["column_table"][places % wide])[:, :, others % wide]
                scores = scores + of_rows + of_columns
            made = scores.softmax(-1) @ heads[2]
            out[n].flatten(1)[:, pixels] = made.transpose(0, 1).flatten(1).T
        return out

    def check(self):
        assert_as_accurate_as_torch(self.run(), self.reference(self.q.dtype), self.reference(torch.float64))
