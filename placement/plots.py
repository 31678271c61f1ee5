"""Plots of placements, drawn on matplotlib axes that the caller owns (matplotlib is the extra `plots`)."""

import base64
import io

import numpy as np

CONTIGUOUS_COLOUR = "#9aa3ad"
PLACED_COLOUR = "#1f6feb"
THIRD_COLOUR = "#d98200"


def new_figure(columns: int = 1, width: float = 6.0, height: float = 3.6):
    """(figure, list of axes) side by side; drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def figure_to_html(figure, alternative: str) -> str:
    """An <img> with the figure inside it as PNG, so that a page needs no other file."""
    return f'<img alt="{alternative}" src="data:image/png;base64,{_png(figure)}">'


def _png(figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def plot_co_selection(axes, matrix: np.ndarray, physical_to_logical_map=None, num_ranks: int = 1, title=""):
    """Draws [num_experts, num_experts] co-selection counts in slot order, with lines between ranks.

    `physical_to_logical_map` None: contiguous. Colour is the square root of the count, so that rare pairs
    show; both axes are slots.
    """
    num_experts = len(matrix)
    order = np.arange(num_experts) if physical_to_logical_map is None else np.asarray(physical_to_logical_map)
    axes.imshow(np.sqrt(matrix[np.ix_(order, order)]), cmap="viridis", interpolation="nearest")
    for rank in range(1, num_ranks):
        edge = rank * num_experts / num_ranks - 0.5
        axes.axhline(edge, color="white", linewidth=0.5)
        axes.axvline(edge, color="white", linewidth=0.5)
    axes.set(title=title, xlabel="slot", ylabel="slot")


def plot_co_selection_before_after(
    axes_pair, matrix, physical_to_logical_map, num_ranks: int, name: str = ""
):
    """`plot_co_selection` twice on two axes: contiguous, then placed."""
    prefix = f"{name}: " if name else ""
    plot_co_selection(axes_pair[0], matrix, None, num_ranks, f"{prefix}contiguous")
    plot_co_selection(axes_pair[1], matrix, physical_to_logical_map, num_ranks, f"{prefix}placed")


def plot_bars(axes, names, series: dict, ylabel: str, title: str = "", percent: bool = False):
    """Grouped bars: `series` maps a label to one value per name (None or nan: no bar)."""
    colours = [CONTIGUOUS_COLOUR, PLACED_COLOUR, THIRD_COLOUR, "#7a3e9d", "#2e8b57"]
    width = 0.8 / max(1, len(series))
    positions = np.arange(len(names))
    for index, (label, values) in enumerate(series.items()):
        heights = np.array([np.nan if value is None else value for value in values], dtype=float)
        offset = (index - (len(series) - 1) / 2) * width
        axes.bar(
            positions + offset, heights * (100 if percent else 1), width, label=label, color=colours[index]
        )
    axes.set_xticks(positions, names, rotation=60 if len(names) > 12 else 0, fontsize=8)
    axes.set(ylabel=ylabel, title=title)
    axes.legend(fontsize=8)
