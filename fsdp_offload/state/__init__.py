"""State shards with homes in host memory, and ``optimizer.state`` as users see it."""
