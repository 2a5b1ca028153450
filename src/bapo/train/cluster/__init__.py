"""A run on a cluster: engines that sample and ranks that learn, in processes of their own. Nothing else needs Ray."""
