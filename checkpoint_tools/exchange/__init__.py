"""Decide which keys replace which when fused tensors are split, or parts merged."""
