"""What a user can put right: shown as one message, without a traceback."""


class ConfigError(ValueError):
    """Something asked for that cannot be done; the message names what, why, and what to do instead."""
