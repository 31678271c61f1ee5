"""nvCOMP's batched ANS coder by its C API, from the library that the pip package brings. NVIDIA only.

All calls go to the stream they are given and never wait for it: addresses, sizes and statuses are arrays in
device memory, scratch is the caller's.
"""

import ctypes
import importlib.metadata

import torch

MAJOR = 6  # of the API below; the bitstream differs between majors as well
_LIBRARY = f"libnvcomp.so.{MAJOR}"
_BACKEND_CUDA, _TYPE_CHAR = 2, 0
_STATES_PER_LANE = 1  # two are 4 % faster and cost 0.02 bits with large chunks, 0.1 with small ones
_HISTOGRAM_REDUCTION_LOG2 = 4  # frequencies from every 16th slice: 15 % faster for 0.02 bits


class CompressOptions(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("histogram_reduction_log2", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    ]


class DecompressOptions(ctypes.Structure):
    _fields_ = [
        ("backend", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("skip_validate", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    ]


class Properties(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32)]


def package_name(cuda_version: str | None) -> str:
    """The pip package that fits torch's CUDA version (e.g. '13.0')."""
    return f"nvidia-libnvcomp-cu{(cuda_version or '13').split('.')[0]}"


def find_library(package: str) -> str:
    """Path of the shared library that ``package`` installed. ValueError with the pip command if there is
    none."""
    wanted = f'wanted {_LIBRARY}; pip install "{package}>={MAJOR},<{MAJOR + 1}", or use --ciera-coder packed'
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"coder 'ans' on cuda: package {package} is not installed; {wanted}") from None
    for file in distribution.files or ():
        if file.name == _LIBRARY:
            return str(distribution.locate_file(file))
    raise ValueError(f"coder 'ans' on cuda: {package} {distribution.version} has no such file; {wanted}")


def open_library(path: str) -> tuple[ctypes.CDLL, int]:
    """The library and its version (1000 · major + 100 · minor + patch). ValueError unless its major is
    MAJOR."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ValueError(
            f"coder 'ans' on cuda: nvCOMP does not load ({error}); use --ciera-coder packed"
        ) from None
    properties = Properties()
    status = library.nvcompGetProperties(ctypes.byref(properties))
    if status or properties.version // 1000 != MAJOR:
        raise ValueError(
            f"coder 'ans' on cuda: {path} is nvCOMP version {properties.version}, status {status}, wanted "
            f"major {MAJOR}; install nvidia-libnvcomp {MAJOR}, or use --ciera-coder packed"
        )
    return library, properties.version


def _declare(library: ctypes.CDLL) -> None:
    """Argument types: without them ctypes would cut addresses and sizes to 32 bits."""
    size, pointer, sizes = ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
    argument_types = {
        "CompressGetTempSize": [size, size, CompressOptions, sizes, size, pointer],
        "CompressGetMaxOutputChunkSize": [size, CompressOptions, sizes],
        "CompressAsync": [
            *(pointer, pointer, size, size, pointer, size, pointer, pointer),
            *(CompressOptions, pointer, pointer),
        ],
        "DecompressGetTempSize": [size, size, DecompressOptions, sizes, size, pointer],
        "DecompressAsync": [
            *(pointer, pointer, pointer, pointer, size, pointer, size, pointer),
            *(DecompressOptions, pointer, pointer),
        ],
    }
    for name, types in argument_types.items():
        function = getattr(library, f"nvcompBatchedANS{name}")
        function.argtypes, function.restype = types, ctypes.c_int
    library.nvcompGetStatusString.restype = ctypes.c_char_p


class NvcompAns:
    """Batched coding of chunks of bytes. Arrays are device tensors: int64 addresses and sizes, int32
    statuses."""

    def __init__(self):
        self.library, self.version = open_library(find_library(package_name(torch.version.cuda)))
        _declare(self.library)
        self.compress_options = CompressOptions(
            data_type=_TYPE_CHAR,
            states_per_lane=_STATES_PER_LANE,
            histogram_reduction_log2=_HISTOGRAM_REDUCTION_LOG2,
        )
        self.decompress_options = DecompressOptions(
            backend=_BACKEND_CUDA, data_type=_TYPE_CHAR, states_per_lane=_STATES_PER_LANE
        )

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self.library, f"nvcompBatchedANS{name}")(*arguments)
        if status:
            said = self.library.nvcompGetStatusString(status)
            raise RuntimeError(
                f"nvcompBatchedANS{name} failed with status {status}: {(said or b'').decode()}"
            )

    def coded_bound(self, chunk_bytes: int) -> int:
        """Bytes of output buffer that a chunk of at most ``chunk_bytes`` needs."""
        bound = ctypes.c_size_t()
        self._call("CompressGetMaxOutputChunkSize", chunk_bytes, self.compress_options, ctypes.byref(bound))
        return bound.value

    def _scratch(self, name: str, options, count: int, chunk_bytes: int, total_bytes: int, stream, device):
        needed = ctypes.c_size_t()
        self._call(name, count, chunk_bytes, options, ctypes.byref(needed), total_bytes, stream)
        return torch.empty(max(needed.value, 16), dtype=torch.uint8, device=device)

    def compress(self, sources, source_bytes, chunk_bytes, total_bytes, outs, out_bytes, statuses) -> None:
        """Code chunk i from ``sources[i]``, ``source_bytes[i]`` long (at most ``chunk_bytes``, together at
        most ``total_bytes``), into ``outs[i]``; its size goes into ``out_bytes[i]``. Addresses are multiples
        of 16.
        """
        stream = torch.cuda.current_stream(sources.device).cuda_stream
        count = sources.numel()
        scratch = self._scratch(
            "CompressGetTempSize",
            self.compress_options,
            count,
            chunk_bytes,
            total_bytes,
            stream,
            sources.device,
        )
        self._call(
            "CompressAsync",
            sources.data_ptr(),
            source_bytes.data_ptr(),
            chunk_bytes,
            count,
            scratch.data_ptr(),
            scratch.numel(),
            outs.data_ptr(),
            out_bytes.data_ptr(),
            self.compress_options,
            statuses.data_ptr(),
            stream,
        )

    def decompress(
        self, sources, source_bytes, chunk_bytes, total_bytes, outs, room, out_bytes, statuses
    ) -> None:
        """Inverse of :meth:`compress`; at most ``room[i]`` bytes are written to ``outs[i]``.

        Only for bytes that :meth:`compress` wrote: on others nvCOMP 6.0.0 was seen to fault on the device.
        """
        stream = torch.cuda.current_stream(sources.device).cuda_stream
        count = sources.numel()
        scratch = self._scratch(
            "DecompressGetTempSize",
            self.decompress_options,
            count,
            chunk_bytes,
            total_bytes,
            stream,
            sources.device,
        )
        self._call(
            "DecompressAsync",
            sources.data_ptr(),
            source_bytes.data_ptr(),
            room.data_ptr(),
            out_bytes.data_ptr(),
            count,
            scratch.data_ptr(),
            scratch.numel(),
            outs.data_ptr(),
            self.decompress_options,
            statuses.data_ptr(),
            stream,
        )
