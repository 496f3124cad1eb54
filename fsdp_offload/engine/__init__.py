"""One offloaded optimizer. Read ``homes``, ``updates``, ``engine``, ``hooks``; then guesses, weights, whole, loads."""
