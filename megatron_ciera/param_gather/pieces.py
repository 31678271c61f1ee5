"""How long pieces should be: the time of a bucket's coded gather, predicted from measured costs. Pure.

Short pieces leave little encoding and decoding uncovered, long ones cost fewer launches, exchanges and gathers.
"""

from collections.abc import Iterator, Sequence

from megatron_ciera.param_gather.layout import piece_lengths
from megatron_ciera.param_gather.selection import HOST_FACTOR, Costs

# Share of the raw bytes that is expected before anything was measured; docs/codec.md.
EXPECTED_RATIO = {"delta": 0.2, "exponent-reuse": 0.7}
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def choose_piece_values(
    shard: int,
    most: int,
    itemsize: int,
    ranks: int,
    codec: str,
    costs: Costs,
    num_slots: int,
    wave_pieces: int,
) -> int:
    """The upper limit of a piece's values, at most `most`, that makes a bucket of `shard` values a rank fastest.

    num_slots, wave_pieces: as in group.Tuning.
    """
    least = -(-shard // most)
    candidates = [-(-shard // count) for count in dict.fromkeys([least, *(c for c in _COUNTS if c > least)])]
    return min(
        candidates,
        key=lambda values: predict_seconds(
            piece_lengths(shard, values), itemsize, ranks, codec, costs, num_slots, wave_pieces
        ),
    )


def wave_counts(lengths: Sequence[int], wave_pieces: int) -> Iterator[int]:
    """Pieces in each wave of one bucket, as waves.py forms them."""
    index, number = 0, 0
    while index < len(lengths):
        room = min(1 << number, wave_pieces) * max(lengths) - lengths[index]
        count = 1
        while index + count < len(lengths) and lengths[index + count] <= room:
            room -= lengths[index + count]
            count += 1
        yield count
        index, number = index + count, number + 1


def predict_seconds(
    lengths: Sequence[int],
    itemsize: int,
    ranks: int,
    codec: str,
    costs: Costs,
    num_slots: int,
    wave_pieces: int,
) -> float:
    """From the first encoding to the last decoding, of one bucket on idle lanes.

    The encoder, the wire, the decoder and the host, which issues every call, each do one thing at a time. A piece
    waits for a receive buffer until the one `num_slots` before it is decoded.
    """
    encode, decode, comm = costs.encode[codec], costs.decode[codec], costs.comm
    waves = list(wave_counts(lengths, wave_pieces))
    host = encoder = wire = decoder = 0.0
    arrived: list[float] = []  # when the payload of each piece is there
    decoded: list[float] = []
    sizes: list[float] = []  # when the sizes of each wave are known
    first = 0

    def start_wave() -> None:
        nonlocal host, encoder, first
        if len(sizes) == len(waves):
            return
        count = waves[len(sizes)]
        encoder = max(encoder, host) + encode(sum(lengths[first : first + count]))
        host += HOST_FACTOR * encode(0)
        sizes.append(max(encoder, host) + costs.exchange)
        first += count

    def decode_piece(index: int) -> None:
        nonlocal host, decoder
        decoder = max(decoder, host, arrived[index]) + decode(lengths[index] * (ranks - 1))
        host += HOST_FACTOR * decode(0)
        decoded.append(decoder)

    start_wave()
    index = 0
    for number, count in enumerate(waves):
        host = max(host, sizes[number])
        for place in range(count):
            free = decoded[index - num_slots] if index >= num_slots else 0.0
            payload = lengths[index] * itemsize * EXPECTED_RATIO[codec]
            wire = max(wire, host, free) + comm(payload)
            host += HOST_FACTOR * comm(0)
            arrived.append(wire)
            if place == 0:
                start_wave()
            index += 1
            if index >= num_slots:
                decode_piece(index - num_slots)
    for rest in range(len(decoded), index):
        decode_piece(rest)
    return decoder
