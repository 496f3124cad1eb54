"""Between formats, and between frameworks' names."""
