"""One op a file: its card, its kernel, and under it the launcher that owns all geometry."""
