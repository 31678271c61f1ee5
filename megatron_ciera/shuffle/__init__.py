"""Token shuffling: tokens move to the rank of their next experts inside attention's own reduce-scatter."""
