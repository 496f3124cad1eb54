"""Figures of real iterations: when each lane of the device was busy, and where its memory was."""

from .memory import Moment, draw_memory
from .recording import Recording, record_iterations
from .timeline import Lane, Timeline, draw, read_trace, timeline_of

__all__ = [
    "Lane",
    "Moment",
    "Recording",
    "Timeline",
    "draw",
    "draw_memory",
    "read_trace",
    "record_iterations",
    "timeline_of",
]
