"""The payload around every codec's body: header, verification hashes, raw mode. Byte layout:
docs/codec.md."""

from dataclasses import dataclass

import numpy as np

from .words import HASH_BLOCK, WordFormat, block_hashes

MAGIC = 0x41524943  # "CIRA" in little-endian bytes
VERSION = 2
HEADER_BYTES = 64
CODEC_IDS = {"exponent-reuse": 1, "delta": 2}
CODER_IDS = {"ans": 1, "packed": 2, "nvcomp": 3}
MODE_CODED, MODE_RAW = 0, 1

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("codec", "u1"),
        ("coder", "u1"),
        ("dtype", "u1"),
        ("num_values", "<u8"),
        ("total_bytes", "<u8"),
        ("mode", "<u4"),
        ("block_size", "<u4"),
        ("hash_block", "<u4"),
        ("coder_version", "<u4"),
        ("extra", "<u4", (6,)),
    ]
)
assert HEADER.itemsize == HEADER_BYTES


class PayloadError(ValueError):
    """A payload that does not parse. Decoders turn it into flagged blocks; it never leaves the codec."""


@dataclass(frozen=True)
class PayloadLayout:
    """What sender and receiver agree on before any payload: everything in the header but the sizes."""

    codec: str
    coder: str
    fmt: WordFormat
    block_size: int
    coder_version: int = 0


def num_hash_blocks(num_values: int) -> int:
    return -(-num_values // HASH_BLOCK)


def body_offset(num_values: int) -> int:
    """First byte of the body: header, then one 4-byte hash a block, padded to 16 bytes."""
    return -(-(HEADER_BYTES + 4 * num_hash_blocks(num_values)) // 16) * 16


def payload_bound(num_values: int, fmt: WordFormat) -> int:
    """Bytes that any payload of this many values fits into: the raw mode, rounded up to 16."""
    return body_offset(num_values) + -(-num_values * fmt.itemsize // 16) * 16


def write_payload(
    out: np.ndarray, layout: PayloadLayout, words: np.ndarray, body: np.ndarray | None, extra=()
) -> int:
    """Write header, hashes and ``body`` into ``out`` (uint8) and return the payload's bytes.

    Stores the words themselves (raw mode) when ``body`` is None or no smaller than they are.
    """
    mode = MODE_CODED
    if body is None or body.size >= words.nbytes:
        mode, body, extra = MODE_RAW, words.view(np.uint8), ()
    start = body_offset(words.size)
    total = start + body.size
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["mode"] = MAGIC, VERSION, mode
    header["codec"], header["coder"] = CODEC_IDS[layout.codec], CODER_IDS[layout.coder]
    header["dtype"], header["block_size"] = layout.fmt.dtype_id, layout.block_size
    header["num_values"], header["total_bytes"] = words.size, total
    header["hash_block"], header["coder_version"] = HASH_BLOCK, layout.coder_version
    header["extra"][0, : len(extra)] = extra
    out[:HEADER_BYTES] = header.view(np.uint8)
    hashes = block_hashes(words).astype("<u4").view(np.uint8)
    out[HEADER_BYTES : HEADER_BYTES + hashes.size] = hashes
    out[HEADER_BYTES + hashes.size : start] = 0
    out[start:total] = body
    return total


def read_header(payload: np.ndarray, layout: PayloadLayout, num_values: int) -> np.ndarray:
    """The parsed header, after every field was checked against what this receiver expects. PayloadError if
    not."""
    if payload.size < body_offset(num_values):
        raise PayloadError(f"payload of {payload.size} bytes is shorter than its header and hashes")
    header = payload[:HEADER_BYTES].view(HEADER)[0]
    wanted = {
        "magic": MAGIC,
        "version": VERSION,
        "codec": CODEC_IDS[layout.codec],
        "coder": CODER_IDS[layout.coder],
        "dtype": layout.fmt.dtype_id,
        "num_values": num_values,
        "block_size": layout.block_size,
        "hash_block": HASH_BLOCK,
        "coder_version": layout.coder_version,
    }
    for field, value in wanted.items():
        if int(header[field]) != value:
            raise PayloadError(f"payload header {field} is {int(header[field])}, wanted {value}")
    if not body_offset(num_values) <= int(header["total_bytes"]) or header["mode"] not in (
        MODE_CODED,
        MODE_RAW,
    ):
        raise PayloadError("payload header has an impossible size or mode")
    return header


def payload_hashes(payload: np.ndarray, num_values: int) -> np.ndarray:
    return payload[HEADER_BYTES : HEADER_BYTES + 4 * num_hash_blocks(num_values)].view("<u4")


def payload_body(payload: np.ndarray, header: np.ndarray, num_values: int) -> np.ndarray:
    """The body bytes that are there; shorter than the header says when the payload was truncated."""
    return payload[body_offset(num_values) : min(payload.size, int(header["total_bytes"]))]
