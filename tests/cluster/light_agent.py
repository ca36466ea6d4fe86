"""The PYTHONPATH with which a start has the agent in `light/` instead of torchrun."""

from __future__ import annotations

from pathlib import Path

LIGHT_AGENT = f"{Path(__file__).parent / 'light'}:{Path(__file__).parents[2]}"
