"""Bytes known before they are held, from the same layout and stage table that the engine runs on."""

from __future__ import annotations

from .states import predict_states

__all__ = ["predict_states"]
