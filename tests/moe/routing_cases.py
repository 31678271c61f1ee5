"""Named routing maps that dispatchers get wrong: empty ranks, hot experts, dropped tokens, odd sizes."""

import torch


def random_map(tokens: int, experts: int, topk: int, seed: int = 0) -> torch.Tensor:
    """[tokens, experts] bool with `topk` set in each row, uniformly."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, scores.topk(topk, dim=1).indices, True)


def routing_cases() -> dict[str, tuple[torch.Tensor, int, int]]:
    """Name -> (routing map, ranks, topk)."""
    one_rank = torch.zeros(12, 16, dtype=torch.bool)
    one_rank[:, 4:6] = True
    dropped = random_map(33, 16, 4, seed=1)
    dropped[::3] = False
    dropped[:, 5] = False
    hot = random_map(40, 16, 2, seed=2)
    hot[:, 7] = True
    return {
        "top2": (random_map(64, 16, 2), 4, 2),
        "top6": (random_map(50, 64, 6), 8, 6),
        "top6, two ranks": (random_map(50, 64, 6), 2, 6),
        "top1": (random_map(17, 8, 1), 4, 1),
        "one expert a rank": (random_map(31, 8, 3), 8, 3),
        "all experts": (torch.ones(5, 8, dtype=torch.bool), 4, 8),
        "everything to one rank": (one_rank, 4, 2),
        "dropped tokens and an empty expert": (dropped, 4, 4),
        "hot expert": (hot, 4, 3),
        "nothing routed": (torch.zeros(9, 8, dtype=torch.bool), 2, 2),
        "one token": (random_map(1, 8, 2), 4, 2),
        "no tokens": (torch.zeros(0, 8, dtype=torch.bool), 2, 2),
        "many blocks, three experts a rank": (random_map(301, 12, 3), 4, 3),
        "200 local experts": (random_map(40, 400, 6), 2, 6),
    }
