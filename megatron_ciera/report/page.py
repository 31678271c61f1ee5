"""One self-contained HTML file: sections, tables, and matplotlib figures as inline images."""

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence

from megatron_ciera.errors import ConfigurationError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
       background: #fff }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2rem } h3 { font-size: 1rem }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td { font-variant-numeric: tabular-nums } td:last-child { overflow-wrap: anywhere; min-width: 9rem }
.numbers td:last-child { min-width: 0 }
.numbers td, td:first-child, td:nth-child(2):not(:last-child) { white-space: nowrap }
@media (max-width: 40rem) { td:first-child { white-space: normal; overflow-wrap: normal } }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right }
.figures { display: flex; flex-wrap: wrap; gap: 1rem }
.figures figure { flex: 1 1 22rem; max-width: min(100%, 29rem) }
figure { margin: .5rem 0 } figcaption, .note { color: #555; font-size: .9rem } img { max-width: 100% }
pre { font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f7f8; padding: .7rem }
"""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """The document; `sections` are (heading, HTML body) pairs."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n{body}\n</html>\n"
    )


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """A table; every cell is escaped. An all-empty header is left out. numbers: columns after the first are flush
    right. Scrolls by itself where the window is too narrow."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    kind = ' class="numbers"' if numbers else ""
    body = (f"<tr>{head}</tr>" if any(header) else "") + "\n".join(lines)
    return f'<div class="wide"><table{kind}>{body}</table></div>'


def figure(draw: Callable, caption: str, columns: int = 1, size: tuple[float, float] = (8, 3.6)) -> str:
    """A figure of `size` inches drawn by `draw(axes, …)` on `columns` axes, as an inline PNG with a caption.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(
            "report.html: matplotlib is missing; pip install 'megatron-ciera[plots]', or '.[plots]' in a clone"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, axes = pyplot.subplots(1, columns, figsize=size, constrained_layout=True)
    draw(*(axes if columns > 1 else [axes]))
    stream = io.BytesIO()
    plot.savefig(stream, format="png", dpi=150)
    pyplot.close(plot)
    image = base64.b64encode(stream.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
