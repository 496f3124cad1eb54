"""The one error that users of the tools see."""

NEED_EXTRA = (
    "The checkpoint tools need the extra [tools]: python -m pip install 'typer>=0.16' 'rich>=14' 'safetensors>=0.5' "
    "'fsspec>=2025.5' 'isal>=1.7'"
)


class CheckpointError(Exception):
    """Something about a checkpoint, or about what was asked for, is wrong.

    The message is one line: what is wrong, and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnreadableObjectError(CheckpointError):
    """An object that consists of more than plain values; it is there, and nobody looks into it."""
