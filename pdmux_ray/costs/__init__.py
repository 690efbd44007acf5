"""How long steps take on a device that is not at hand: for the simulator and the fake device."""
