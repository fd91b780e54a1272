"""Bytes known before they are held, from the same layout and stage table that the engine runs on.

    closed     bytes per parameter and per rank from three numbers; budgets, advice, optimizer instances
    states     the same added up over a layout; and what a built engine will hold
    files      what a step reads from files and writes to them
    instants   what passes through beside the states, and when it is most
    shapes     names and shapes from a file
    plan       the question and its answer
    texts      the tables of five published texts, recomputed
    job        the user's own model, optimizer, batch and loss, by name

Only `job` and what is asked of a built engine need torch.
"""

from __future__ import annotations

from .states import predict_states, predict_tiers

__all__ = ["predict_states", "predict_tiers"]
