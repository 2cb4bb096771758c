"""A fleet on real machines: what Flower's processes run, and how they are started."""
