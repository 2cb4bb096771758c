"""Vision transformers with named parts."""
