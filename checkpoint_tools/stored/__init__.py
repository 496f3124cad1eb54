"""Stored checkpoints: open, check and read them within memory bounds, and without running code that they contain."""
