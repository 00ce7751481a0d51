"""Ops that make lists: a mask becomes active blocks and fringes."""
