"""Self-contained HTML pages of a run."""
