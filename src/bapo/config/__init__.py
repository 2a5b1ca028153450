"""Configuration: what a run is, checked before anything heavy is imported."""
