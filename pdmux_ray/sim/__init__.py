"""The simulator: a fleet of instances on a virtual clock, with the engine, policies, router and transfers that servers run."""
