"""The module of docs/adapters/areal.md: an AReaL actor within bounds, importable by every worker."""

from areal.engine import FSDPPPOActor

from bapo import ClipSettings
from bapo.adapters.areal import WithinBounds
from bapo.adapters.shared import settings_of


class BapoActor(WithinBounds, FSDPPPOActor):
    clip_settings = ClipSettings(target_share=0.42)


class PushOnce(WithinBounds, FSDPPPOActor):
    clip_settings = ClipSettings(target_share=0.42, used_low=1.0)


class Brake(WithinBounds, FSDPPPOActor):
    clip_settings = settings_of("brake", brake=1.0)


class Fixed(WithinBounds, FSDPPPOActor):
    clip_settings = ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2))
