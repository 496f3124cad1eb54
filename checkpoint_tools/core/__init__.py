"""Shared by every room: errors, sizes, patterns, regions of tensors and their parts, tables."""
