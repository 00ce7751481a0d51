"""Ops on block-sparse weights."""
