"""Measurements: commands that print a table. Servers are measured over HTTP, the control plane and runners in this process."""
