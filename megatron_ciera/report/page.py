"""One self-contained HTML file: sections, tables, and matplotlib figures as inline images."""

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence

from megatron_ciera.errors import ConfigurationError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left }
td:nth-child(2) { font-variant-numeric: tabular-nums } figcaption { color: #555 } img { max-width: 100% }
"""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """The document; `sections` are (heading, HTML body) pairs."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n{body}\n</html>\n"
    )


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every cell is escaped. An all-empty header is left out."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>" + (f"<tr>{head}</tr>" if any(header) else "") + "\n".join(lines) + "</table>"


def figure(draw: Callable, caption: str, columns: int = 1) -> str:
    """A figure drawn by `draw(axes, …)` on `columns` axes, as an inline PNG with a caption.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(
            "report.html: matplotlib is missing. pip install 'megatron-ciera[plots]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, axes = pyplot.subplots(1, columns, figsize=(8, 3.6), constrained_layout=True)
    draw(*(axes if columns > 1 else [axes]))
    stream = io.BytesIO()
    plot.savefig(stream, format="png", dpi=110)
    pyplot.close(plot)
    image = base64.b64encode(stream.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
