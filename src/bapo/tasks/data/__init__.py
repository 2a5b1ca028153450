"""Data sets from anywhere: where rows come from, what their columns mean, problems and demonstrations made of them."""
