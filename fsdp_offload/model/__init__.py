"""A model's memory: built on the host, and asleep there."""
