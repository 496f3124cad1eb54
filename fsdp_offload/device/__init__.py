"""The only room that knows streams, events and pinned memory: arena, ring, lanes and the link."""

from .copy_queues import ask_for_copy_queues

HAS_COPY_QUEUES = ask_for_copy_queues()  # before anybody uses CUDA
