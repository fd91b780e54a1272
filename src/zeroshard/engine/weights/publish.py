"""Publish updated parameters to every rank: encode them if their codecs do so, and send them if ranks hold copies."""

from __future__ import annotations

from collections.abc import Sequence

from .buffer import Buffer


def publish(buffers: Sequence[Buffer], *, overlap: bool, outside: bool = False) -> None:
    """Send updated parameters to every rank: the same buckets on all ranks. outside: no step made the update."""
    for buffer in buffers if outside else ():
        buffer.codec.forget()
        buffer.changed()
        buffer.gathered.current &= buffer.resident
    agreeing = [buffer.codec for buffer in buffers if buffer.codec.agrees]
    for kind in dict.fromkeys(type(codec) for codec in agreeing):
        kind.agree(agreeing)
    for buffer in buffers:
        buffer.publish(overlap=overlap)
    for buffer in buffers:
        buffer.published()
