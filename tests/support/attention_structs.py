"""The structs of csrc/core/attention as ctypes, for tests that call kernels without a framework."""

import ctypes
import math

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NO_DIAGONAL, NO_BAND = 1 << 30, 2**31 - 1


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *fields(ctypes.c_int64, "batch_stride head_stride stride")]


class Rule(ctypes.Structure):
    _fields_ = fields(ctypes.c_int32, "diagonal band prefix stride phases")


class Layout(ctypes.Structure):
    _fields_ = [
        ("rule", Rule),
        *fields(ctypes.c_int32, "block q_blocks k_blocks batches heads"),
        *fields(ctypes.c_void_p, "rows columns mask_index masks"),
        ("mask_count", ctypes.c_int32),
    ]


class Dropout(ctypes.Structure):
    _fields_ = [("p", ctypes.c_float), ("seed", ctypes.c_void_p)]


class Params(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int32), ("batch", ctypes.c_int64),
        *fields(ctypes.c_int32, "heads kv_heads q_length k_length head_dim"), ("scale", ctypes.c_float),
        *fields(Tensor, "q k v out"), *fields(ctypes.c_void_p, "lse sums"), ("layout", Layout),
        *fields(ctypes.c_void_p, "q_lengths k_lengths"), ("dropout", Dropout),
    ]  # fmt: skip


class BackwardParams(ctypes.Structure):
    _fields_ = [
        ("forward", Params),
        ("grad_out", Tensor),
        ("grad_lse", ctypes.c_void_p),
        *fields(Tensor, "grad_q grad_k grad_v"),
        ("deterministic", ctypes.c_bool),
    ]


def pack_bits(rows: torch.Tensor) -> torch.Tensor:
    """bool [..., n] as int32 words, bit k % 32 of word k / 32."""
    n = rows.shape[-1]
    padded = torch.nn.functional.pad(rows.long(), (0, -n % 32)).view(*rows.shape[:-1], -1, 32)
    words = (padded << torch.arange(32, device=rows.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


class Case:
    """A problem: tensors (B, H, T, D) of any strides, blocks bool [1 or B, 1 or H, q_blocks, k_blocks] or None."""

    def __init__(self, q, k, v, *, blocks=None, block=64, masks=None, mask_index=None, diagonal=NO_DIAGONAL,
                 band=NO_BAND, prefix=0, stride=0, phases=1, scale=None, q_lengths=None, k_lengths=None, dropout=0.0,
                 seed=None):  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.scale = scale or q.shape[-1] ** -0.5
        self.blocks, self.block, self.masks, self.mask_index = blocks, block, masks, mask_index
        self.rule = {"diagonal": diagonal, "band": band, "prefix": prefix, "stride": stride, "phases": phases}
        self.q_lengths, self.k_lengths = q_lengths, k_lengths
        self.dropout, self.seed = dropout, seed  # [2] int64
        batch, heads, q_length, _ = q.shape
        poison = float("nan")
        self.out = torch.full_like(q, poison, memory_format=torch.preserve_format)
        self.lse = torch.full((batch, heads, q_length), poison, device=q.device)

    def params(self) -> Params:
        """Keeps what it points at."""
        (batch, heads, q_length, dim), (kv_heads, k_length) = self.q.shape, self.k.shape[1:3]
        phases = self.rule["phases"]
        layout = Layout(
            rule=Rule(**self.rule),
            block=self.block,
            q_blocks=-(-q_length // phases // self.block),
            k_blocks=-(-k_length // phases // self.block),
            batches=1,
            heads=1,
        )
        if self.blocks is not None:
            self.rows, self.columns = pack_bits(self.blocks), pack_bits(self.blocks.transpose(-1, -2).contiguous())
            layout.batches, layout.heads = self.blocks.shape[:2]
            layout.rows, layout.columns = self.rows.data_ptr(), self.columns.data_ptr()
        if self.masks is not None:
            self.mask_words = pack_bits(self.masks)
            layout.masks, layout.mask_index = self.mask_words.data_ptr(), self.mask_index.data_ptr()
            layout.mask_count = len(self.masks)
        return Params(
            dtype=DTYPES[self.q.dtype], batch=batch, heads=heads, kv_heads=kv_heads, q_length=q_length,
            k_length=k_length, head_dim=dim, scale=self.scale, q=view(self.q), k=view(self.k), v=view(self.v),
            out=view(self.out), lse=self.lse.data_ptr(), layout=layout, q_lengths=pointer(self.q_lengths),
            k_lengths=pointer(self.k_lengths), dropout=Dropout(self.dropout, pointer(self.seed)),
        )  # fmt: skip

    def backward(self, grad_out, grad_lse=None, deterministic=False) -> BackwardParams:
        """Of the outputs as they are; the gradients in self.grads."""
        self.grads = [torch.full_like(t, float("nan")) for t in (self.q, self.k, self.v)]
        names = ("grad_q", "grad_k", "grad_v")
        return BackwardParams(
            forward=self.params(), grad_out=view(grad_out), grad_lse=pointer(grad_lse), deterministic=deterministic,
            **{name: view(t) for name, t in zip(names, self.grads, strict=True)},
        )  # fmt: skip

    def visible(self) -> torch.Tensor:
        """bool [B, H, T, T], from the definitions of layout.h."""
        batch, heads, q_length, _ = self.q.shape
        k_length, r, device = self.k.shape[2], self.rule, self.q.device
        q, k = torch.arange(q_length, device=device)[:, None], torch.arange(k_length, device=device)[None]
        same = q % r["phases"] == k % r["phases"]
        q, k = q // r["phases"], k // r["phases"]
        distance = q + r["diagonal"] - k
        near = distance < r["band"]
        if r["stride"]:
            near |= distance % r["stride"] == 0
        see = ((k < r["prefix"]) | ((distance >= 0) & near)) & same
        see = see[None, None].expand(batch, heads, -1, -1).clone()
        if self.blocks is not None:
            see &= self.blocks[:, :, q[:, 0] // self.block][:, :, :, k[0] // self.block]
        if self.masks is not None:
            of = self.mask_index[:, q[:, 0] // self.block][:, :, k[0] // self.block].long()
            count = len(self.masks)
            bits = self.masks[of.clamp(0, count - 1), (q % self.block)[None], (k % self.block)[None]]
            see &= (bits | (of < 0) | (of >= count))[None]
        if self.k_lengths is not None:
            see &= (torch.arange(k_length, device=device) < self.k_lengths[:, None])[:, None, None]
        if self.q_lengths is not None:
            see &= (torch.arange(q_length, device=device) < self.q_lengths[:, None])[:, None, :, None]
        return see

    def kept(self) -> torch.Tensor:
        """bool [B, H, T, T]: attention.h's dropout_bits()."""
        (batch, heads, q_length, _), k_length, phases = self.q.shape, self.k.shape[2], self.rule["phases"]
        plane = torch.arange(batch * heads).view(batch, heads, 1, 1) * phases
        q, k = torch.arange(q_length).view(-1, 1), torch.arange(k_length)
        key, offset = (int(s) & (2**64 - 1) for s in self.seed.tolist())
        key ^= offset * 0x9E3779B97F4A7C15 & (2**64 - 1)
        words = philox(key, k // phases // 8, q // phases, plane + q % phases, torch.tensor(offset >> 32))
        i = (k // phases % 8).expand_as(words[0])
        word = torch.stack(words).gather(0, (i // 2)[None])[0]
        return (word >> 16 * (i % 2) & 0xFFFF >= int(self.dropout * 65536 + 0.5)).to(self.q.device)

    def reference(self, dtype, grad_out=None, grad_lse=None):
        """(out, lse), or with grad_out the gradients of q, k, v too; computed densely in dtype."""
        leaves = [torch.nan_to_num(t.detach()).to(dtype).requires_grad_() for t in (self.q, self.k, self.v)]
        group = self.q.shape[1] // self.k.shape[1]
        q, k, v = leaves[0], *(t.repeat_interleave(group, 1) for t in leaves[1:])
        see = self.visible()
        some = see.any(-1)
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~see, -math.inf)
        lse = torch.where(some, scores.masked_fill(~some[..., None], 0).float().logsumexp(-1), -math.inf)
        if dtype == torch.float64:
            lse = torch.where(some, scores.masked_fill(~some[..., None], 0).logsumexp(-1), -math.inf)
        weights = scores.masked_fill(~some[..., None], 0).softmax(-1) * some[..., None]
        if self.dropout:
            weights = torch.where(self.kept(), weights / (1 - self.dropout), 0)
        out = weights @ v
        if grad_out is None:
            return out.detach(), lse.detach()
        outputs, grads = [out], [torch.nan_to_num(grad_out).to(dtype) * some[..., None]]
        if grad_lse is not None:
            outputs.append(lse.masked_fill(~some, 0))
            grads.append(grad_lse.to(lse.dtype) * some)
        return out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, grads)


def philox(key: int, *counter: torch.Tensor) -> list[torch.Tensor]:
    """Philox-4x32-10 (Salmon et al., 2011) on int64 tensors of 32-bit words."""

    def product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = a * (b & 0xFFFF), a * (b >> 16)  # each below 2^48
        total = low + ((high & 0xFFFF) << 16)
        return (high >> 16) + (total >> 32) & 0xFFFFFFFF, total & 0xFFFFFFFF

    c = list(torch.broadcast_tensors(*counter))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        (a1, a0), (b1, b0) = product(0xD2511F53, c[0]), product(0xCD9E8D57, c[2])
        c = [b1 ^ c[1] ^ k0, b0, a1 ^ c[3] ^ k1, a0]
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c


def view(t: torch.Tensor) -> Tensor:
    assert t.stride(-1) == 1
    return Tensor(t.data_ptr(), *t.stride()[:3])


def pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
