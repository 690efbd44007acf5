"""What is asked of a server, and when: the load generator sends it, the simulator replays it. Pure but for reading files."""
