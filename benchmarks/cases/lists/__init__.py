"""Lists of active blocks and fringes."""
