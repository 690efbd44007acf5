"""Measurements: each module is a command that prints a table. Talks to servers over HTTP only."""
