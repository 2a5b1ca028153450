"""Makes trajectories: engines that sample tokens, and the scheduler that decides who samples when."""
