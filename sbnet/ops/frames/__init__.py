"""Ops on frames: what a decoder gives becomes what a network takes."""
