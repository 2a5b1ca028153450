"""The parts of benchmarks/campaign.py: what is run, how it is attacked, and what counts as a failure."""
