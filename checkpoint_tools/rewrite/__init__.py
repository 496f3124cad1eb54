"""New checkpoints: planned, written block by block, and there only when they are complete."""
