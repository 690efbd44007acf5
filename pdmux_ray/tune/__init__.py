"""The tuner: which topology, modes and routes give the most goodput per GPU. It chooses what the simulator runs."""
