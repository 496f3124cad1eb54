"""Fused tensors: the rules by which they are made of parts, in files and in state dicts in memory."""
