"""Checksums of a finished checkpoint."""
