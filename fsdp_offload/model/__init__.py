"""Where a model's forward and backward meet the engine: hooks, tuning from measured iterations, sleep."""
