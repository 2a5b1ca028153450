"""The parts of tools/campaign.py: what is run, how it is attacked, and what counts as a failure."""
