"""What every room uses: errors, sizes, patterns, regions of tensors and their parts, tables."""
