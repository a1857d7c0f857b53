"""Bars as SVG: what the benchmarks and the matrix of GPU workloads draw with."""

from __future__ import annotations

WIDTH = 680
LEFT, LONGEST, HEIGHT = 210, 380, 20
"""Where bars begin, how wide the longest may be, how high each is."""


def frame(title: str, note: str, shapes: list[str], height: int) -> str:
    """A whole picture: a white ground, its title, what the marks mean."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="10" y="20" font-size="14">{title}</text>',
            f'<text x="10" y="36" fill="#555555">{note}</text>',
            *shapes,
            "</svg>",
            "",
        ]
    )


def name(y: int, text: str) -> str:
    """What a bar is about, left of it."""
    return f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{text}</text>'


def bar(x: float, y: int, width: float, colour: str) -> str:
    """One bar, or one part of it."""
    return f'<rect x="{x:g}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}"/>'


def figure(x: float, y: int, text: str) -> str:
    """A number right of a bar."""
    return f'<text x="{x:.1f}" y="{y + 14}">{text}</text>'
