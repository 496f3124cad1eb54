"""Conversions between formats, and between frameworks' names of weights."""
