"""The only place that knows both sides: rollout and learn, joined by the buffer."""
