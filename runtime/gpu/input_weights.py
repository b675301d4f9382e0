"""Weights of an engine that has none: streamed from their checkpoint to the device, and checked on the way."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridtrt.build.engine import EngineConfig
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.build.tensorrt.stored import stored_tensors
from hybridtrt.build.tensorrt.target import checksum
from hybridtrt.converters.checkpoint import Checkpoint, load_checkpoint
from hybridtrt.runtime.gpu.device import Bytes, Device

CHUNK = 64 << 20  # bytes of pinned memory that tensors pass through


def weights_source(config: EngineConfig, info: TensorRTInfo) -> Checkpoint | None:
    """The checkpoint with the weights of an engine that has none.

    Raises `ValueError` where it is gone, or holds another model than the engine.
    """
    if info.checkpoint is None:
        return None
    folder = Path(info.checkpoint)
    try:
        checkpoint = load_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"the engine's weights are those of {folder}, which cannot be read: {error}") from None
    if checkpoint.config != config.model:
        raise ValueError(f"{folder} holds another model than the engine was built from; build the engine again")
    return checkpoint


def upload_weights(config: EngineConfig, info: TensorRTInfo, device: Device) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Address and shape of every input that is a weight.

    Raises `ValueError` for a checkpoint that is gone or not the one that the engine was built from.
    """
    checkpoint, checksums = weights_source(config, info), info.checksums
    if checkpoint is None or checksums is None:
        return {}
    folder = checkpoint.path

    def read(name: str) -> torch.Tensor:
        tensor = checkpoint.tensor(name)
        if checksum(tensor) != checksums.get(name):
            raise ValueError(f"{folder}: {name} has changed since the engine was built; build the engine again")
        return tensor

    staging = device.pinned(CHUNK)
    found = {}
    for name, spec, tensor in stored_tensors(config, read):
        data: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
        address = device.allocate(data.nbytes)
        for start in range(0, data.nbytes, CHUNK):
            piece = data[start : start + CHUNK]
            staging[: piece.nbytes] = piece
            device.upload(address + start, staging[: piece.nbytes])
            device.synchronize()
        found[name] = address, tuple(int(dim) for dim in spec.shape)
    return found
