"""Attention beside its ops: layouts of images, and Hugging Face models."""

from sbnet.attention.images import conv_layout, deconv_layout
from sbnet.attention.register import register_attention

__all__ = ["conv_layout", "deconv_layout", "register_attention"]
