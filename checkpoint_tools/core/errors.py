"""The one error that users of the tools see."""

NEED_EXTRA = (
    "The checkpoint tools need the extra [tools]: python -m pip install 'typer>=0.16' 'rich>=14' 'safetensors>=0.5' "
    "'fsspec>=2025.5' 'isal>=1.7'"
)


class CheckpointError(Exception):
    """Something about a checkpoint, or about what was asked for, is wrong.

    The message is one line: what is wrong, and what to do. Whatever opens, reads, plans or writes may raise it. Rules
    and plans, which serve state dicts in memory too, raise ValueError; commands make this error of that.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
