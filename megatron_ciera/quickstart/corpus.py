"""Real text that every machine has: the Python standard library's own sources, as a Megatron dataset.

python -m megatron_ciera.quickstart.corpus PREFIX   writes PREFIX.bin and PREFIX.idx
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 257  # bytes, and the end-of-document token
END_OF_DOCUMENT = 256
MAX_BYTES = 6_000_000
_LEAST_BYTES = 200_000


def standard_library_files() -> list[Path]:
    """Source and text files of the running Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
    files = [path for suffix in ("*.py", "*.txt") for path in root.rglob(suffix)]
    return sorted(path for path in files if not skipped & set(path.relative_to(root).parts))


def write_dataset(prefix: Path, max_bytes: int = MAX_BYTES) -> int:
    """Writes `prefix.bin` and `prefix.idx`, one document a file, one token a byte; returns the token count.

    Raises:
        FileNotFoundError: the standard library is not there as files.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    num_tokens = 0
    for path in standard_library_files():
        text = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16)
        document = np.append(text, np.uint16(END_OF_DOCUMENT))
        builder.add_document(document, [len(document)])
        num_tokens += len(document)
        if num_tokens >= max_bytes:
            break
    builder.finalize(f"{prefix}.idx")
    if num_tokens < _LEAST_BYTES:
        raise FileNotFoundError(
            f"the Python standard library in {sysconfig.get_paths()['stdlib']} has only {num_tokens} bytes of "
            "source text; use a Python that has its library as files"
        )
    return num_tokens


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__.split("\n\n", 1)[1].strip(), file=sys.stderr)
        return 2
    from megatron_ciera import cpu

    if cpu.is_needed():
        cpu.install()
    print(f"{write_dataset(Path(argv[0])):,} tokens, one a byte, in {argv[0]}.bin and {argv[0]}.idx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
