"""Stored checkpoints: opened, checked and read within bounds, without running their code."""
