"""Finished pipelines: a source of frames, a mask, a network, a sink."""

from sbnet.apps.pipeline.cameras import Cameras
from sbnet.apps.pipeline.frames import Frame, PipelineError, Result
from sbnet.apps.pipeline.large import Tiled, run_large
from sbnet.apps.pipeline.networks import Network, open_network
from sbnet.apps.pipeline.pipeline import Pipeline
from sbnet.apps.pipeline.sinks import open_sink
from sbnet.apps.pipeline.sources import Source, open_source
from sbnet.apps.pipeline.summary import Summary

__all__ = [
    "Cameras",
    "Frame",
    "Network",
    "Pipeline",
    "PipelineError",
    "Result",
    "Source",
    "Summary",
    "Tiled",
    "open_network",
    "open_sink",
    "open_source",
    "run_large",
]
