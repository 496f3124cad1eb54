"""Fused tensors: rules that name their parts; splits and merges, in files and in state dicts in memory."""
