"""Experts in a plan: parameters of which a rank has some rows, divided among `ep` ranks."""

from __future__ import annotations

from ..errors import UserError
from ..policies.layout import Layout
from .quantities import whole


def check_experts(layout: Layout, ep: int | None, ranks: int, **others: object) -> None:
    """Refuse `Layout.along` and `ep` that do not go together, or not with the ranks.

    others: settings that are not planned beside them.
    """
    if bool(layout.along) != (ep is not None):
        raise UserError(
            "Layout.along and Machine.ep belong together", instead='Layout(along={"*.experts.*": "edp"}), Machine(ep=8)'
        )
    if ep is not None:
        if told := " and ".join(name for name, value in others.items() if value is not None):
            raise UserError(f"{told}: not planned for experts", instead="leave it out")
        whole("Machine.ep", ep, ranks)
        if ranks % ep:
            raise UserError("Machine.ep must divide the ranks", got=f"ep={ep}, ranks={ranks}")
        if layout.axis == "ep":
            raise UserError(
                "Layout.along names the axis whose ranks have the same rows, and Machine.ep counts those with others",
                got=repr(layout.along),
                instead='Layout(along={"*.experts.*": "edp"})',
            )
