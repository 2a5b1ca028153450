"""Pure functions of tensors: the method itself. No I/O, no logging, no config files, no frameworks."""
