"""One offloaded optimizer. Read ``homes``, ``updates``, ``engine`` and ``hooks``; then the others."""
