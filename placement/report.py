"""The HTML report of a fit: one self-contained page with tables and plots."""

import html

import numpy as np

from placement.co_selection import co_selection
from placement.exhaustive import fewest_rows, num_partitions
from placement.file import Placement, write_atomically
from placement.plots import (
    figure_to_html,
    new_figure,
    plot_bars,
    plot_co_selection_before_after,
)
from placement.prediction import rank_counts
from placement.rows import contiguous_expert_to_rank, count_rows, rows_removed

_LARGEST_EXHAUSTIVE = 6000
_RANDOM_PLACEMENTS = 5
_BYTES_PER_VALUE = 2
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2128}"
    "table{border-collapse:collapse}td,th{padding:.15rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left;white-space:nowrap}img{max-width:100%}"
)


def rank_traffic(top_indices: np.ndarray, expert_to_rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """[num_ranks, num_ranks] rows sent from the rank that holds the token to each destination.

    Tokens are held by position, in equal consecutive shares.
    """
    reached = rank_counts(top_indices, expert_to_rank, num_ranks) > 0
    holder = np.arange(len(top_indices)) * num_ranks // len(top_indices)
    traffic = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(traffic, holder, reached.astype(np.int64))
    return traffic


def rows_per_token(top_indices, expert_to_rank, num_ranks: int, ranks_per_node: int) -> tuple[float, float]:
    """(rows to ranks of the token's own node, rows to other nodes) per token, tokens held by position."""
    traffic = rank_traffic(top_indices, expert_to_rank, num_ranks)
    node = np.arange(num_ranks) // ranks_per_node
    same = node[:, None] == node[None, :]
    own_rank = np.eye(num_ranks, dtype=bool)
    return traffic[same & ~own_rank].sum() / len(top_indices), traffic[~same].sum() / len(top_indices)


def seconds_per_token(rows: tuple[float, float], cluster: dict, hidden_size: int) -> float:
    """Time of one all-to-all of bf16 rows per token of a rank, links inside and between nodes at once.

    `cluster`: the `cluster:` section of a config: `intra_node`, `inter_node` with `bandwidth_gb_s`, 1e9 bytes
    a second per GPU and direction. Latency is left out: it does not depend on placement.
    """
    row_bytes = hidden_size * _BYTES_PER_VALUE
    within = rows[0] * row_bytes / (cluster["intra_node"]["bandwidth_gb_s"] * 1e9)
    if not rows[1]:
        return within
    return max(within, rows[1] * row_bytes / (cluster["inter_node"]["bandwidth_gb_s"] * 1e9))


def write_report(
    path, top_indices, result, tables, cluster: dict | None = None, hidden_size: int = 4096
) -> None:
    """Writes the report of a `FitResult` measured on its fit tokens ([layers, tokens, topk]).

    `tables`: prediction tables per layer or None; `cluster`: link speeds for the expected gain. Needs
    matplotlib.
    """
    placement = result.placement
    parts = [_header(placement, top_indices), _layer_table(result, tables)]
    parts.append(_rows_section(top_indices, placement))
    parts.append(_load_section(result))
    parts.append(_traffic_section(top_indices, placement))
    parts.append(_locality_section(placement, tables))
    if cluster:
        parts.append(_gain_section(top_indices, placement, cluster, hidden_size))
    parts.append(_matrix_section(top_indices, placement))
    page = f"<!doctype html><meta charset=utf-8><title>Expert placement</title><style>{_STYLE}</style>"
    write_atomically(path, page + "\n".join(parts) + "\n")


def _header(placement: Placement, top_indices) -> str:
    fit = placement.fit
    source = html.escape(str(fit.get("source")))
    return (
        f"<h1>Expert placement</h1><p>{placement.num_experts} experts, top-{placement.topk}, "
        f"{placement.expert_parallel_size} ranks ({placement.ranks_per_node} a node), {len(placement.layers)} "
        f"layers, fitted on {top_indices.shape[1]} tokens of {source}. All numbers below are on the fit "
        "tokens, except held-out ones; run <code>evaluate_placement.py</code> on other tokens for the "
        "rest.</p>"
    )


def _layer_table(result, tables) -> str:
    rows = []
    for index, layer in enumerate(result.layers):
        table = tables[index] if tables else None
        locality = "-" if table is None else f"{table.held_out_locality:.1%}"
        rows.append(
            f"<tr><td>{layer.layer_id}<td>{layer.rows_removed_contiguous:.1%}<td>{layer.rows_removed:.1%}"
            f"<td>{layer.rank_load_contiguous:.2f}<td>{layer.rank_load:.2f}<td>{layer.held_out_gain:.1%}"
            f"<td>{layer.held_out_sigmas:.1f}<td>{locality}<td>{'placed' if layer.changed else 'contiguous'}"
        )
    return (
        "<h2>Layers</h2><table><tr><th>layer<th>rows removed, contiguous<th>placed<th>rank load, contiguous"
        "<th>placed<th>held-out gain<th>standard errors<th>held-out locality<th>choice"
        f"{''.join(rows)}</table>"
    )


def _rows_section(top_indices, placement: Placement) -> str:
    size, experts = placement.expert_parallel_size, placement.num_experts
    contiguous = contiguous_expert_to_rank(experts, size)
    rng = np.random.default_rng(0)
    series = {"contiguous": [], "placed": [], "random": []}
    small = num_partitions(experts, size) <= _LARGEST_EXHAUSTIVE
    if small:
        series["exact optimum, any load"] = []
    for index, tokens in enumerate(top_indices):
        series["contiguous"].append(rows_removed(tokens, contiguous))
        series["placed"].append(rows_removed(tokens, placement.expert_to_rank(index)))
        random = [rows_removed(tokens, rng.permutation(contiguous)) for _ in range(_RANDOM_PLACEMENTS)]
        series["random"].append(float(np.mean(random)))
        if small:
            series["exact optimum, any load"].append(rows_removed(tokens, fewest_rows(tokens, experts, size)))
    figure, (axes,) = new_figure(1, 10.0)
    plot_bars(axes, _names(placement), series, "% of rows", percent=True)
    note = "" if small else " There are too many placements to show the exact optimum."
    image = figure_to_html(figure, "rows removed")
    return f"<h2>Rows removed</h2><p>One row per token and rank.{note}</p>{image}"


def _load_section(result) -> str:
    figure, (axes,) = new_figure(1, 10.0)
    series = {
        "contiguous": [layer.rank_load_contiguous for layer in result.layers],
        "placed": [layer.rank_load for layer in result.layers],
    }
    plot_bars(axes, _names(result.placement), series, "max / mean")
    return f"<h2>Rank load</h2>{figure_to_html(figure, 'rank load')}"


def _traffic_section(top_indices, placement: Placement) -> str:
    size = placement.expert_parallel_size
    contiguous = contiguous_expert_to_rank(placement.num_experts, size)
    before = sum(rank_traffic(tokens, contiguous, size) for tokens in top_indices)
    after = sum(rank_traffic(t, placement.expert_to_rank(i), size) for i, t in enumerate(top_indices))
    figure, axes = new_figure(2, 5.0)
    for axis, traffic, title in zip(axes, (before, after), ("contiguous", "placed"), strict=True):
        image = axis.imshow(traffic / 1e3, vmin=0, vmax=max(before.max(), after.max()) / 1e3, cmap="magma")
        axis.set(title=title, xlabel="to rank", ylabel="from rank")
        for scale in (axis.xaxis, axis.yaxis):
            scale.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axis, label="thousand rows")
    return (
        f"<h2>Traffic between ranks</h2><p>All layers.</p>{figure_to_html(figure, 'traffic between ranks')}"
    )


def _locality_section(placement: Placement, tables) -> str:
    known = [index for index, table in enumerate(tables or []) if table is not None]
    if not known:
        return "<h2>Prediction</h2><p>No layer has two MoE layers before it: nothing is predicted.</p>"
    figure, (axes,) = new_figure(1, 10.0)
    series = {
        "by position": [tables[index].held_out_chance for index in known],
        "predicted": [tables[index].held_out_locality for index in known],
    }
    plot_bars(axes, [_names(placement)[i] for i in known], series, "% of assignments", percent=True)
    gain = float(np.mean(series["predicted"]) - np.mean(series["by position"]))
    advice = (
        "Token shuffling would hardly repay: advised against."
        if gain < 0.05
        else "Token shuffling may repay."
    )
    return (
        "<h2>Prediction</h2><p>Share of assignments on the predicted owner, tables of one half of the tokens "
        f"on the other half: {gain:.1%} above position. {advice}</p>{figure_to_html(figure, 'locality')}"
    )


def _gain_section(top_indices, placement: Placement, cluster: dict, hidden_size: int) -> str:
    size, per_node = placement.expert_parallel_size, placement.ranks_per_node
    contiguous = contiguous_expert_to_rank(placement.num_experts, size)
    before, after = [], []
    for index, tokens in enumerate(top_indices):
        for ranks, found in ((contiguous, before), (placement.expert_to_rank(index), after)):
            rows = rows_per_token(tokens, ranks, size, per_node)
            found.append(seconds_per_token(rows, cluster, hidden_size) * 1e6 * 8192)
    figure, (axes,) = new_figure(1, 10.0)
    series = {"contiguous, one row a rank": before, "placed": after}
    plot_bars(axes, _names(placement), series, "microseconds")
    saved = sum(before) - sum(after)
    return (
        f"<h2>Expected gain on {html.escape(str(cluster.get('gpu', 'this cluster')))}</h2><p>Time of one "
        f"all-to-all of 8,192 tokens a rank, hidden size {hidden_size}, bf16, by link speed alone (a "
        "projection, not a measurement). Four such exchanges a layer and step (dispatch and combine, forward "
        f"and backward) save {4 * saved / 1e3:.2f} ms over all "
        f"layers.</p>{figure_to_html(figure, 'expected gain')}"
    )


def _matrix_section(top_indices, placement: Placement) -> str:
    parts = ["<h2>Co-selection before and after</h2><p>Slots of one rank are next to each other.</p>"]
    most = max(
        range(len(placement.layers)),
        key=lambda i: -count_rows(top_indices[i], placement.expert_to_rank(i)),
    )
    for index in dict.fromkeys((0, most, len(placement.layers) - 1)):
        layer = placement.layers[index]
        matrix = co_selection(top_indices[index], placement.num_experts)
        figure, axes = new_figure(2, 5.0, 5.0)
        plot_co_selection_before_after(
            axes, matrix, layer.physical_to_logical_map, placement.expert_parallel_size, str(layer.layer_id)
        )
        parts.append(figure_to_html(figure, f"co-selection of {layer.layer_id}"))
    return "".join(parts)


def _names(placement: Placement) -> list[str]:
    return [
        str(layer.layer_id.layer) if layer.layer_id.block == "decoder" else f"mtp {layer.layer_id.layer}"
        for layer in placement.layers
    ]
