"""One offloaded optimizer. Read ``homes``, ``step``, ``engine`` and ``hooks``; then the others."""
