"""The values that options of the command `sbnet` take."""

from __future__ import annotations

import enum


class Device(str, enum.Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Encoder(str, enum.Enum):
    x264 = "x264"
    nvenc = "nvenc"


class Decoder(str, enum.Enum):
    auto = "auto"
    host = "host"
    nvdec = "nvdec"


class Dtype(str, enum.Enum):
    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Mode(str, enum.Enum):
    masked = "masked"
    exact = "exact"
    cached = "cached"
    dense = "dense"


class View(str, enum.Enum):
    picture = "picture"
    side = "side"


class Group(str, enum.Enum):
    all = "all"
    ops = "ops"
    conv = "conv"
    block = "block"
    network = "network"
    networks = "networks"
    weights = "weights"
    attention = "attention"
    training = "training"
