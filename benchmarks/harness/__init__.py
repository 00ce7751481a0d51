"""How it is measured, checked and reported."""
