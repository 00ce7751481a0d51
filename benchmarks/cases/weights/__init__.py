"""Block-sparse weights."""
