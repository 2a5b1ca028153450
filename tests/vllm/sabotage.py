"""Faults inside vLLM's worker, which tests turn on by remote call. Each stands for a bug that happened to someone."""

from bapo.rollout.vllm import plugin

_mapped, _mend = plugin.mapped, plugin.mend_tied_heads


class Sabotage(plugin.Worker):
    def lose(self, lost: str | None) -> None:
        """This weight does not arrive. None: all do."""
        plugin.mapped = lambda bucket: ((name, tensor) for name, tensor in _mapped(bucket) if name != lost)

    def corrupt(self, damaged: str) -> None:
        """One bit of this weight arrives flipped."""

        def mapped(bucket):
            for name, tensor in _mapped(bucket):
                if name == damaged:
                    tensor.view(-1).view(plugin.torch.uint8)[5] ^= 1
                yield name, tensor

        plugin.mapped = mapped

    def leave_heads(self, stale: bool) -> None:
        """Tied heads are left as vLLM's layerwise loading leaves them."""
        plugin.mend_tied_heads = (lambda model: None) if stale else _mend
