"""Benchmarks of every op, layer and network against what one would run instead: `sbnet bench`. See README.md here."""
