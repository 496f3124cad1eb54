"""The only room that knows streams, events and pinned memory: arena, ring, lanes and the link."""
