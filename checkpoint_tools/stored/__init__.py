"""Checkpoints as they lie in storage: opened, bounded, and read; no code of theirs runs."""
