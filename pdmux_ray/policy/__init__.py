"""Pure decisions. Stdlib and `pdmux_ray.types` only: nothing here mutates, awaits, logs, reads a clock or draws random numbers."""
