"""Commands that only read: inspect (keys, tiling), verify (completeness) and diff (differences)."""
