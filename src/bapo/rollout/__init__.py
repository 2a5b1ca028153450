"""Makes trajectories: engines that sample tokens, and the scheduler that decides which responses are sampled when."""
