"""Views of checkpoints: content, tiling, completeness, and differences."""
