"""Pure decisions. Stdlib and `types` only: nothing here mutates, awaits, logs, reads a clock or draws random numbers."""
