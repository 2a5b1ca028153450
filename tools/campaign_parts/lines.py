"""A straight line through points, and small figures of curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, GAP = 640, 90, 150, 26


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line; 0 for fewer than two times."""
    if len(times) < 2:
        return 0.0
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    along = sum((time - middle) * (value - mean) for time, value in zip(times, values, strict=True))
    return along / spread if spread else 0.0


def figure(samples: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    """One small panel per curve over minutes, from 0 to a little above its greatest value, as SVG."""
    height = len(names) * (HEIGHT + GAP) + GAP
    last = samples[-1]["minutes"] or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" font-family="sans-serif" '
        'font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, name in enumerate(names):
        top = GAP / 2 + number * (HEIGHT + GAP)
        most = max(sample[name] for sample in samples) * 1.1 or 1.0
        points = " ".join(
            f"{LEFT + WIDTH * sample['minutes'] / last:.1f},{top + HEIGHT * (1 - sample[name] / most):.1f}"
            for sample in samples
        )
        parts += [
            f'<line x1="{LEFT}" y1="{top + HEIGHT}" x2="{LEFT + WIDTH}" y2="{top + HEIGHT}" stroke="#999"/>',
            f'<text x="8" y="{top + HEIGHT / 2:.0f}">{name}</text>',
            f'<text x="{LEFT - 6}" y="{top + 12:.0f}" text-anchor="end" fill="#666">{most:.0f}</text>',
            f'<text x="{LEFT - 6}" y="{top + HEIGHT:.0f}" text-anchor="end" fill="#666">0</text>',
            f'<polyline fill="none" stroke="#1f6feb" stroke-width="1.5" points="{points}"/>',
        ]
    parts.append(f'<text x="{LEFT + WIDTH}" y="{height - 4}" text-anchor="end" fill="#666">{last:.0f} minutes</text>')
    return "\n".join([*parts, "</svg>\n"])
