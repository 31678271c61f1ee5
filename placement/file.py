"""The placement file: the contract between fitting (this package) and training.

A placement says, for each MoE layer, which logical expert lives in which slot. Slot `s` lives on
expert-parallel rank `s // (num_experts / expert_parallel_size)`.
"""

import json
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

FORMAT_NAME = "megatron-ciera-placement"
FORMAT_VERSION = 1
DECODER = "decoder"
MTP = "mtp"
FIT_COMMAND = "ciera-fit-placement (in a clone: scripts/fit_placement.py)"
_WAY_OUT = f"fit a placement for this model with {FIT_COMMAND}"


def is_permutation(physical_to_logical_map, num_experts: int) -> bool:
    """True when the map holds each of 0 .. num_experts-1 exactly once."""
    values = np.asarray(physical_to_logical_map)
    return (
        values.shape == (num_experts,)
        and np.issubdtype(values.dtype, np.integer)
        and np.array_equal(np.sort(values), np.arange(num_experts))
    )


def invert_map(physical_to_logical_map) -> np.ndarray:
    """[num_experts] slot -> expert to [num_experts] expert -> slot."""
    inverse = np.empty(len(physical_to_logical_map), dtype=np.int64)
    inverse[np.asarray(physical_to_logical_map)] = np.arange(len(physical_to_logical_map))
    return inverse


@dataclass(frozen=True, order=True)
class LayerId:
    """Which MoE layer: `layer` is the 0-based global decoder layer; for block "mtp" the MTP depth.

    `inner_layer` is the layer inside one MTP head, 0 unless the head is a stack.
    """

    block: str
    layer: int
    inner_layer: int = 0

    def __str__(self) -> str:
        if self.block == DECODER:
            return f"layer {self.layer}"
        inner = f" (inner layer {self.inner_layer})" if self.inner_layer else ""
        return f"MTP layer {self.layer}{inner}"


@dataclass(frozen=True, eq=False)
class LayerPlacement:
    """One MoE layer. `physical_to_logical_map`: [num_experts] int64, the expert in each slot."""

    layer_id: LayerId
    physical_to_logical_map: np.ndarray

    @property
    def logical_to_physical_map(self) -> np.ndarray:
        """[num_experts] int64, the slot of each expert."""
        return invert_map(self.physical_to_logical_map)

    @property
    def is_contiguous(self) -> bool:
        """True when every expert sits in the slot of its own number."""
        return bool((self.physical_to_logical_map == np.arange(len(self.physical_to_logical_map))).all())


@dataclass(frozen=True, eq=False)
class Placement:
    """A whole placement. `fit` holds {"tokens", "source", "iteration"}.

    `source_layers` is "moe_order" when row i of the trace was the i-th MoE layer of the model, so that
    the layer numbers in the file are ranks in that order; otherwise None.
    """

    num_experts: int
    topk: int
    expert_parallel_size: int
    ranks_per_node: int
    layers: tuple[LayerPlacement, ...]
    fit: dict = field(default_factory=dict)
    source_layers: str | None = None
    path: str | None = None

    @property
    def num_local_experts(self) -> int:
        """Experts on each expert-parallel rank."""
        return self.num_experts // self.expert_parallel_size

    @property
    def tables_path(self) -> Path | None:
        """Where the prediction tables of this placement lie: same stem, `.npz`."""
        return Path(self.path).with_suffix(".npz") if self.path else None

    @property
    def digest(self) -> str:
        """Hash of which expert lives where; what the fit was made from does not count."""
        where = {key: value for key, value in self.to_document().items() if key != "fit"}
        return blake2b(json.dumps(where).encode(), digest_size=16).hexdigest()

    def expert_to_rank(self, index: int) -> np.ndarray:
        """[num_experts] int64: the expert-parallel rank of each expert in the index-th stored layer."""
        return self.layers[index].logical_to_physical_map // self.num_local_experts

    @classmethod
    def contiguous(cls, layer_ids, num_experts, topk, expert_parallel_size, ranks_per_node=None):
        """The placement that training starts from: expert e in slot e."""
        layers = tuple(LayerPlacement(layer_id, np.arange(num_experts)) for layer_id in layer_ids)
        return cls(num_experts, topk, expert_parallel_size, ranks_per_node or expert_parallel_size, layers)

    @classmethod
    def load(cls, path) -> "Placement":
        """Reads and validates a placement file. Raises ValueError naming file, layer and reason."""
        path = Path(path)
        name = f"placement file {path}"
        if path.is_dir():
            raise ValueError(f"{name}: found a folder, wanted the .json in it; or {_WAY_OUT}")
        if not path.is_file():
            raise ValueError(f"{name}: no such file; {_WAY_OUT}")
        content = path.read_bytes()
        if content.startswith(b"PK"):
            raise ValueError(
                f"{name}: found an .npz, the prediction tables or a trace; give the placement's .json, which lies "
                f"beside its tables ({path.with_suffix('.json').name}), or {_WAY_OUT}"
            )
        try:
            document = json.loads(content)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if path.suffix != ".json" and path.with_suffix(".json").is_file():
                raise ValueError(
                    f"{name}: not JSON, wanted the placement itself; give {path.with_suffix('.json')} beside it"
                ) from None
            is_cut = content.lstrip()[:1] in (b"", b"{") and not content.rstrip().endswith(b"}")
            cut = "; the file seems cut off: copy it again, or" if is_cut else ";"
            raise ValueError(f"{name}: not JSON ({error}){cut} {_WAY_OUT}") from None
        return cls.from_document(document, str(path))

    @classmethod
    def from_document(cls, document: dict, path: str | None = None) -> "Placement":
        """Builds a validated placement from the parsed JSON document."""
        name = f"placement file {path}" if path else "placement"
        _check_header(document, name)
        layers = []
        for index, entry in enumerate(document["layers"]):
            if not isinstance(entry, dict) or not isinstance(entry.get("layer"), int):
                raise ValueError(f"{name}: entry {index} of layers has no integer 'layer'; {_WAY_OUT}")
            layer_id = LayerId(entry.get("block", DECODER), entry["layer"], entry.get("inner_layer", 0))
            values = entry.get("physical_to_logical_map")
            if not isinstance(values, list) or not all(type(value) is int for value in values):
                raise ValueError(
                    f"{name}: {layer_id}: physical_to_logical_map is not a list of integers; {_WAY_OUT}"
                )
            layers.append(LayerPlacement(layer_id, np.asarray(values, dtype=np.int64)))
        placement = cls(
            num_experts=document["num_experts"],
            topk=document["topk"],
            expert_parallel_size=document["expert_parallel_size"],
            ranks_per_node=document["ranks_per_node"],
            layers=tuple(layers),
            fit=dict(document.get("fit") or {}),
            source_layers=document.get("source_layers"),
            path=path,
        )
        placement.validate()
        return placement

    def validate(self) -> None:
        """Raises ValueError, naming file and layer, unless every layer is a permutation that fits."""
        name = self._name
        if self.num_experts % self.expert_parallel_size:
            raise ValueError(
                f"{name}: num_experts {self.num_experts} is not divisible by expert_parallel_size "
                f"{self.expert_parallel_size}; {_WAY_OUT}"
            )
        if self.expert_parallel_size % self.ranks_per_node:
            raise ValueError(
                f"{name}: expert_parallel_size {self.expert_parallel_size} is not a multiple of "
                f"ranks_per_node {self.ranks_per_node}; {_WAY_OUT}"
            )
        if not self.layers:
            raise ValueError(f"{name}: no layers; {_WAY_OUT}")
        seen = set()
        for layer in self.layers:
            if layer.layer_id.block not in (DECODER, MTP) or layer.layer_id.layer < 0:
                raise ValueError(
                    f"{name}: block {layer.layer_id.block!r} layer {layer.layer_id.layer}: found an unknown "
                    "block or a negative layer, wanted block 'decoder' or 'mtp' and a layer from 0; "
                    f"{_WAY_OUT}"
                )
            if layer.layer_id in seen:
                raise ValueError(f"{name}: {layer.layer_id} appears twice; {_WAY_OUT}")
            seen.add(layer.layer_id)
            if not is_permutation(layer.physical_to_logical_map, self.num_experts):
                raise ValueError(f"{name}: {layer.layer_id}: {self._why_no_permutation(layer)}; {_WAY_OUT}")

    def check_model(
        self, num_experts: int, topk: int, expert_parallel_size: int, moe_layers, mtp_layers=()
    ) -> dict[LayerId, np.ndarray]:
        """Checks that the placement fits a model and resolves its layers.

        `moe_layers`: 0-based global decoder layer numbers that are MoE, ascending, of the whole model.
        `mtp_layers`: MTP depths (ints) or LayerId of MTP layers with an MoE. Returns LayerId ->
        physical_to_logical_map ([num_experts] int64) for each layer of the model that the file covers:
        every decoder MoE layer, and MTP layers where the file has them (a file of decoder layers only
        leaves MTP layers contiguous). Raises ValueError naming file, layer, found, wanted, way out.
        """
        for what, found, wanted in (
            ("num_experts", self.num_experts, num_experts),
            ("topk", self.topk, topk),
            ("expert_parallel_size", self.expert_parallel_size, expert_parallel_size),
        ):
            if found != wanted:
                raise ValueError(f"{self._name}: {what} is {found}, the model has {wanted}; {_WAY_OUT}")
        decoder_ids = [LayerId(DECODER, int(layer)) for layer in moe_layers]
        mtp_ids = [layer if isinstance(layer, LayerId) else LayerId(MTP, int(layer)) for layer in mtp_layers]
        if self.source_layers == "moe_order":
            return self._resolve_by_order(decoder_ids, mtp_ids)
        return self._resolve_by_number(decoder_ids, mtp_ids)

    def _resolve_by_order(self, decoder_ids, mtp_ids):
        wanted = decoder_ids + mtp_ids
        if len(self.layers) not in (len(decoder_ids), len(wanted)):
            mtp_note = f" and {len(mtp_ids)} MTP layers" if mtp_ids else ""
            raise ValueError(
                f"{self._name}: {len(self.layers)} layers in MoE order, the model has {len(decoder_ids)} "
                f"MoE layers{mtp_note}; {_WAY_OUT}"
            )
        maps = [layer.physical_to_logical_map for layer in self.layers]
        return dict(zip(wanted, maps, strict=False))

    def _resolve_by_number(self, decoder_ids, mtp_ids):
        maps = {layer.layer_id: layer.physical_to_logical_map for layer in self.layers}
        listed = ", ".join(str(layer_id.layer) for layer_id in decoder_ids)
        for layer_id in maps:
            if layer_id not in decoder_ids and layer_id not in mtp_ids:
                raise ValueError(
                    f"{self._name}: {layer_id} is not an MoE layer of the model, whose MoE layers are "
                    f"{listed}{' and MTP' if mtp_ids else ''}; {_WAY_OUT}"
                )
        for layer_id in decoder_ids:
            if layer_id not in maps:
                raise ValueError(
                    f"{self._name}: {layer_id} is missing, the model has MoE layers {listed}; {_WAY_OUT}"
                )
        return maps

    def to_document(self) -> dict:
        """The JSON document of the file."""
        document = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "num_experts": self.num_experts,
            "topk": self.topk,
            "expert_parallel_size": self.expert_parallel_size,
            "ranks_per_node": self.ranks_per_node,
            "fit": self.fit,
        }
        if self.source_layers:
            document["source_layers"] = self.source_layers
        document["layers"] = [_layer_entry(layer) for layer in self.layers]
        return document

    def save(self, path) -> None:
        """Validates, then writes the file whole or not at all (rename of a temporary file)."""
        self.validate()
        write_atomically(path, json.dumps(self.to_document()) + "\n")

    @property
    def _name(self) -> str:
        return f"placement file {self.path}" if self.path else "placement"

    def _why_no_permutation(self, layer: LayerPlacement) -> str:
        values = layer.physical_to_logical_map
        if len(values) != self.num_experts:
            return f"physical_to_logical_map has {len(values)} entries, num_experts is {self.num_experts}"
        outside = values[(values < 0) | (values >= self.num_experts)]
        if len(outside):
            return f"expert {int(outside[0])} is outside 0..{self.num_experts - 1}"
        experts, counts = np.unique(values, return_counts=True)
        twice = int(experts[counts > 1][0])
        slots = np.flatnonzero(values == twice).tolist()
        return f"expert {twice} is in several slots {slots}: not a permutation"


def load_placement(path) -> Placement:
    """`Placement.load` under the name that the package exports."""
    return Placement.load(path)


def write_atomically(path, text: str | bytes) -> None:
    """Writes text or bytes to `path` through a temporary file in the same folder and a rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _layer_entry(layer: LayerPlacement) -> dict:
    entry = {"layer": layer.layer_id.layer}
    if layer.layer_id.block != DECODER:
        entry["block"] = layer.layer_id.block
    if layer.layer_id.inner_layer:
        entry["inner_layer"] = layer.layer_id.inner_layer
    entry["physical_to_logical_map"] = [int(expert) for expert in layer.physical_to_logical_map]
    return entry


def _check_header(document, name: str) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"{name}: format is {found!r}, wanted {FORMAT_NAME!r}; {_WAY_OUT}")
    if document.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{name}: version is {document.get('version')!r}, this package reads {FORMAT_VERSION}; {_WAY_OUT}"
        )
    for key in ("num_experts", "topk", "expert_parallel_size", "ranks_per_node"):
        value = document.get(key)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: {key} is {value!r}, wanted a positive integer; {_WAY_OUT}")
    if not isinstance(document.get("layers"), list):
        raise ValueError(f"{name}: layers is missing or not a list; {_WAY_OUT}")
    if document.get("source_layers") not in (None, "moe_order"):
        raise ValueError(
            f"{name}: source_layers is {document['source_layers']!r}, wanted 'moe_order' or nothing; "
            f"{_WAY_OUT}"
        )
