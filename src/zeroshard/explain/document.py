"""The page: one HTML file, and the JSON document inside it.

The template is built from `web/` and ships with the package. It has one place for the document, which the browser reads
as data and never as code. `web/DATA.md` says what is in it.
"""

from __future__ import annotations

import html
import json
import math
import os
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

import zeroshard

from ..checkpoint.staging import put
from ..errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "zeroshard-page", 1
PLACE = '<script type="application/json" id="data">null</script>'
# Inside a script element only `</script` and `<!--` end anything; the rest is for whoever copies the text elsewhere.
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Page:
    """A finished page. A notebook shows it in place; `write` puts it into a file."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def html(self) -> str:
        """Return the whole file as text. It opens without a network, from any folder."""
        return template().replace(PLACE, PLACE.replace("null", embedded(self.document)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file beside `path` and put it there by one rename. Only an earlier page is replaced."""
        put(path, self.html(), f'"format":"{FORMAT}"')

    def _repr_html_(self) -> str:
        inside = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{inside}" style="width: 100%; height: 48rem; border: 0"></iframe>'

    def __repr__(self) -> str:
        return f"Page({', '.join(part for part in ('walkthroughs', 'run') if self.document[part])})"


def document(
    *,
    walkthroughs: dict[str, Any] | None,
    run: dict[str, Any] | None,
    other: dict[str, Any] | None = None,
    compared: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a page's document: the built-in walkthroughs, a run, or both; and a second run to compare it with."""
    version = zeroshard.__version__
    page = {"format": FORMAT, "version": VERSION, "zeroshard": version, "walkthroughs": walkthroughs, "run": run}
    if other is not None:
        page |= {"other": other, "compared": compared}
    return {**page, "links": found} if (found := links()) else page


def links() -> dict[str, str]:
    """Return {label: address} for the footer, from the package's metadata, and `ZEROSHARD_DOCS` where it is set.

    An address under .invalid, which nobody can have (RFC 2606), stands for one that the project does not have yet.
    """
    try:
        urls = metadata.metadata("zeroshard").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    parts = (url.partition(", ") for url in urls)
    named = {label: address for label, _, address in parts if not address.endswith(".invalid")}
    docs = os.environ.get("ZEROSHARD_DOCS")
    return {**named, "Documentation": docs} if docs else named


def embedded(document: dict[str, Any]) -> str:
    """Write the document as JSON that is safe inside a script element, whatever its strings say."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPED.items():
        text = text.replace(character, escape)
    return text


def template() -> str:
    """Return the page without a document."""
    text = _packed("page.html")
    if text.count(PLACE) != 1:
        raise StateError("the page's template has no place for the document", expected=PLACE, instead="make web")
    return text


def built_in() -> dict[str, Any]:
    """Read the walkthroughs that `python -m walkthroughs.build` wrote."""
    walkthroughs: dict[str, Any] = json.loads(_packed("walkthroughs.json"))["walkthroughs"]
    return walkthroughs


def _packed(name: str) -> str:
    try:
        return (resources.files(__package__) / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StateError(
            "a file of the package is missing", where=name, instead="make web, or install zeroshard again"
        ) from error


def plain(value: float) -> float | str:
    """Return a number that JSON has, or "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def numbers(tensor: Tensor) -> list[Any]:
    """List all elements, flat: fp32 with the fewest digits that read back as the same number, other dtypes exactly."""
    import numpy as np
    import torch

    flat = tensor.detach().reshape(-1).cpu()
    if flat.dtype == torch.float32:
        return [plain(float(str(np.float32(value)))) for value in flat.tolist()]
    return [plain(value) for value in flat.double().tolist()]


def matrix(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "values": numbers(tensor)}
