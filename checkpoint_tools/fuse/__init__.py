"""Fused tensors: rules for their parts, and splits and merges in files and in state dicts in memory."""
