"""Command line of the checkpoint tools: a file for each command, and what they share."""
