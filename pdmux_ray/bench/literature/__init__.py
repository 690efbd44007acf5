"""Published figures, and what the simulator makes of the same set-ups: docs/literature.md."""
