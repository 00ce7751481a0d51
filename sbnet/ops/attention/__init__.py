"""Block-sparse attention: layouts and ops."""
