"""Layers on active blocks."""
