"""What can be measured of how a page looks: nothing sticks out, is cut off, overlaps or is too pale to read."""

from pathlib import Path

WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 420, "height": 900}
LEGIBLE = 4.5
"""Contrast of text that WCAG asks for (level AA)."""

MEASURE = Path(__file__).with_name("looks.js").read_text(encoding="utf-8")


def flaws(page, within="body", legible=LEGIBLE):
    """What is wrong with how a page looks now, one sentence each."""
    return page.evaluate(MEASURE, [within, legible])
