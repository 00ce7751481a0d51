"""Attention as others have it: the functions of sparse_attention, blocksparse's three ops, Hugging Face models."""

from sbnet.attention.images import bst_conv_layout, bst_deconv_layout
from sbnet.attention.implementations import attention_impl, blocksparse_attention_impl
from sbnet.attention.register import register_attention
from sbnet.attention.transformer import BlocksparseTransformer

__all__ = [
    "BlocksparseTransformer",
    "attention_impl",
    "blocksparse_attention_impl",
    "bst_conv_layout",
    "bst_deconv_layout",
    "register_attention",
]
