"""How long steps take on this machine: measured once (`pdmux profile`), fitted, corrected while it is used."""
