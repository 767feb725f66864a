"""Ragged batches: which rows of a step belong to which request, and which pool slots they read."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Lengths = npt.NDArray[np.int64]


def _indptr(lens: Lengths) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lens, dtype=np.int64)))


def _check_lens(name: str, lens: Lengths) -> None:
    if lens.ndim != 1 or lens.dtype != np.int64:
        raise ValueError(f"{name} must be one-dimensional int64, got shape {lens.shape} of {lens.dtype}")
    if (lens < 0).any():
        raise ValueError(f"{name} has a negative length: {lens.tolist()}")


def _check_total(name: str, tensor: torch.Tensor, expected: int) -> None:
    if tuple(tensor.shape) != (expected,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the lengths ask for ({expected},)")


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """One step's queries and keys.

        request b owns query rows  qo_indptr[b] .. qo_indptr[b+1]
        and reads the pool slots   kv_indices[kv_indptr[b] .. kv_indptr[b+1]]   (its read-slot map, any order)

    The tensors live on the pool's device; the lengths are also kept on the host so that planning never waits
    for the device. Slots may repeat, within a request and between requests.
    """

    qo_indptr: torch.Tensor  # int32 [B+1]
    kv_indptr: torch.Tensor  # int32 [B+1]
    kv_indices: torch.Tensor  # int32 or int64 [sum of kv_lens]
    qo_lens: Lengths  # int64 [B], host
    kv_lens: Lengths  # int64 [B], host

    def __post_init__(self) -> None:
        _check_lens("qo_lens", self.qo_lens)
        _check_lens("kv_lens", self.kv_lens)
        if len(self.qo_lens) != len(self.kv_lens):
            raise ValueError(f"{len(self.qo_lens)} query lengths but {len(self.kv_lens)} key lengths")
        _check_total("qo_indptr", self.qo_indptr, len(self.qo_lens) + 1)
        _check_total("kv_indptr", self.kv_indptr, len(self.kv_lens) + 1)
        _check_total("kv_indices", self.kv_indices, int(self.kv_lens.sum()))
        if self.kv_indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"kv_indices must be int32 or int64, got {self.kv_indices.dtype}")

    @classmethod
    def build(cls, qo_lens: npt.ArrayLike, kv_lens: npt.ArrayLike, kv_indices: torch.Tensor) -> "RaggedLayout":
        """From host lengths and the flattened read-slot maps; index pointers go to `kv_indices`' device."""
        qo, kv = np.asarray(qo_lens, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
        device = kv_indices.device
        pointers = torch.from_numpy(np.concatenate((_indptr(qo), _indptr(kv))).astype(np.int32))
        pointers = pointers.to(device, non_blocking=True)
        return cls(pointers[: len(qo) + 1], pointers[len(qo) + 1 :], kv_indices, qo, kv)

    @property
    def batch_size(self) -> int:
        return len(self.qo_lens)

    @property
    def num_queries(self) -> int:
        return int(self.qo_lens.sum())

    @property
    def device(self) -> torch.device:
        return self.kv_indices.device

    def check_answerable(self) -> None:
        """Raises ValueError when a request has queries but not one key to attend to."""
        starved = np.flatnonzero((self.qo_lens > 0) & (self.kv_lens == 0))
        if len(starved):
            raise ValueError(f"requests {starved.tolist()} have queries but no keys to attend to")


@dataclass(frozen=True, eq=False)
class ImportanceTargets:
    """P probes, each asking how much attention its mask queries pay to its affix tokens.

        probe p asks with rows   query_rows[query_indptr[p] .. query_indptr[p+1]]  of this step's q
        about the pool slots     key_slots[key_indptr[p] .. key_indptr[p+1]]       (affix read slots, in order)

    A probe may have no queries (its scores stay as they are) or no keys.
    """

    query_rows: torch.Tensor  # int64 [M]
    query_indptr: torch.Tensor  # int32 [P+1]
    key_slots: torch.Tensor  # int64 [sum of key_lens]
    key_indptr: torch.Tensor  # int32 [P+1]
    query_lens: Lengths  # int64 [P], host
    key_lens: Lengths  # int64 [P], host

    def __post_init__(self) -> None:
        _check_lens("query_lens", self.query_lens)
        _check_lens("key_lens", self.key_lens)
        if len(self.query_lens) != len(self.key_lens):
            raise ValueError(f"{len(self.query_lens)} query lengths but {len(self.key_lens)} key lengths")
        _check_total("query_indptr", self.query_indptr, len(self.query_lens) + 1)
        _check_total("key_indptr", self.key_indptr, len(self.key_lens) + 1)
        _check_total("query_rows", self.query_rows, int(self.query_lens.sum()))
        _check_total("key_slots", self.key_slots, int(self.key_lens.sum()))

    @classmethod
    def build(
        cls,
        query_rows: torch.Tensor,
        query_lens: npt.ArrayLike,
        key_slots: torch.Tensor,
        key_lens: npt.ArrayLike,
    ) -> "ImportanceTargets":
        """From flattened rows and slots and the host lengths of each probe's part."""
        queries, keys = np.asarray(query_lens, dtype=np.int64), np.asarray(key_lens, dtype=np.int64)
        pointers = torch.from_numpy(np.concatenate((_indptr(queries), _indptr(keys))).astype(np.int32))
        pointers = pointers.to(key_slots.device, non_blocking=True)
        head, tail = pointers[: len(queries) + 1], pointers[len(queries) + 1 :]
        return cls(query_rows, head, key_slots, tail, queries, keys)

    @property
    def num_probes(self) -> int:
        return len(self.query_lens)

    @property
    def num_keys(self) -> int:
        return int(self.key_lens.sum())
