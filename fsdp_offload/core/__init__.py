"""One cache with a known future. Read ``items``, ``cache``, ``loop``; then ``buckets``, ``room`` and ``packing``."""
