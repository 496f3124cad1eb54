"""Streams, events and pinned memory: arenas, lanes, and limits of host memory."""

from .copy_queues import ask_for_copy_queues

HAS_COPY_QUEUES = ask_for_copy_queues()  # before CUDA is initialized
