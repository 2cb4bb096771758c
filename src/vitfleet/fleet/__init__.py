"""Where clients live, and how messages reach them."""
