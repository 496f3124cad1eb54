"""The only room that knows streams, events and pinned memory: arena, lanes, limits."""

from .copy_queues import ask_for_copy_queues

HAS_COPY_QUEUES = ask_for_copy_queues()  # before CUDA is initialized
