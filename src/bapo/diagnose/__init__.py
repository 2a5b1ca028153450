"""`bapo diagnose`: what the clip does to the updates of any trainer, from batches that it logged."""
