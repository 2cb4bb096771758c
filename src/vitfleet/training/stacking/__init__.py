"""Several clients as one: their tensors on a leading axis, their steps, their results."""
