"""Publish updated parameters to every rank: encode them if their codecs do so, and send them if ranks hold copies."""

from __future__ import annotations

from collections.abc import Sequence

from .bucket import Bucket


def publish(buckets: Sequence[Bucket], *, overlap: bool, outside: bool = False) -> None:
    """Send updated parameters to every rank: the same buckets on all ranks. outside: no step made the update."""
    for bucket in buckets if outside else ():
        bucket.codec.forget()
        bucket.changed()
        bucket.gathered.current &= bucket.resident
    agreeing = [bucket.codec for bucket in buckets if bucket.codec.agrees]
    for kind in dict.fromkeys(type(codec) for codec in agreeing):
        kind.agree(agreeing)
    for bucket in buckets:
        bucket.publish(overlap=overlap)
    for bucket in buckets:
        bucket.published()
