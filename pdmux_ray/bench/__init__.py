"""Measurements: `load`, which is `pdmux bench`, and commands that print a table. Servers are measured over HTTP, the
control plane and runners in this process."""
