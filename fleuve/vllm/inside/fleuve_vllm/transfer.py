"""Published weights into a vLLM worker's model: a safetensors file in shared memory or on a path that all sides see, or
its bytes by broadcast.
Of a file with adapters it makes whole weights, from those that the server was started with.

Where there are several workers (tensor parallel), each gets the whole file and takes its part.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fleuve.types import Invitation, WeightFile
from fleuve.weights.adapters import Adapter, adapters_of, merged
from fleuve.weights.broadcast import Receiver
from fleuve.weights.store import WeightError, read_weights
from fleuve.wire.confine import confined

DIRECTORIES_VARIABLE = "FLEUVE_VLLM_WEIGHTS"
"""Directories that weights may be read from, separated as in PATH; where it is not set, any."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Which of the prepared weights are to be swapped in."""

    version: int
    checksum: str


class FileTransfer(WeightTransferEngine[NoInit, FileUpdate]):
    """`prepare` reads and verifies beside the running engine; start, update and finish swap, while it is paused."""

    init_info_cls = NoInit
    update_info_cls = FileUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        self.whole = True
        self._prepared: tuple[WeightFile, dict[str, torch.Tensor]] | None = None
        self._receiver: Receiver | None = None
        self._receiving: Future[tuple[WeightFile, dict[str, torch.Tensor]]] | None = None
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleuve-receive")
        self._parameters = {name for name, _ in self.model.named_parameters()}  # each tied one once
        value = os.environ.get(DIRECTORIES_VARIABLE)
        self._directories = None if value is None else [Path(part) for part in value.split(os.pathsep) if part]

    def prepare(self, weights: dict[str, Any]) -> int:
        """Read and verify; how many bytes the tensors have.

        Raises:
            WeightError: the file is not what was published.
            OutsideError: it lies where this server may not read.
        """
        file = msgspec.convert(weights, WeightFile)
        self._prepared = None
        path = file.path if self._directories is None else str(confined(file.path, self._directories))
        return self._hold(file, read_weights(msgspec.structs.replace(file, path=path)))

    def receive(self, weights: dict[str, Any], invitation: dict[str, Any], seat: int) -> None:
        """Begin to receive, in a thread; `seat` says which of the server's workers this is."""
        file, asked = msgspec.convert(weights, WeightFile), msgspec.convert(invitation, Invitation)
        if self._receiver is None:
            self._receiver = Receiver(str(self.device), seat)
        receiver, self._prepared = self._receiver, None
        self._receiving = self._beside.submit(lambda: (file, receiver.read(file, asked)))

    def received(self) -> int | None:
        """How many bytes the tensors have that `receive` began to receive; None: they are not there yet.

        Raises:
            BroadcastError: they did not come, or are not what was published.
        """
        if self._receiving is None:
            return None if self._prepared is None else sum(t.nbytes for t in self._prepared[1].values())
        if not self._receiving.done():
            return None
        receiving, self._receiving = self._receiving, None
        return self._hold(*receiving.result())

    def _hold(self, file: WeightFile, tensors: dict[str, torch.Tensor]) -> int:
        """Keep them for the update that follows; how many bytes they have."""
        if adapters := adapters_of(tensors):
            tensors = self._with_adapters(adapters, file.version)
        self._prepared = file, tensors
        return sum(tensor.nbytes for tensor in tensors.values())

    def _with_adapters(self, adapters: dict[str, Adapter], version: int) -> dict[str, torch.Tensor]:
        """The weights that the server was started with, from where it got them, with `adapters` merged in."""
        loader = get_model_loader(dataclasses.replace(self.vllm_config.load_config, use_tqdm_on_load=False))
        weights = dict(loader.get_all_weights(self.model_config, self.model))
        for name, adapter in adapters.items():
            shape = tuple(weights[name].shape) if name in weights else None
            if shape != adapter.shape:
                found = f"is {shape}" if shape else "is not there"
                raise WeightError(f"version {version} changes {name} {adapter.shape}, which {found} in the model")
            weights[name] = merged(weights[name].to(self.model_config.dtype), adapter)
        return weights

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._prepared is None:
            raise WeightError("no weights were prepared: call fleuve_prepare first")
        self.whole = False
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        if self._prepared is None:
            raise WeightError(f"version {update_info.version} was not prepared")
        file, tensors = self._prepared
        if (file.version, file.checksum) != (update_info.version, update_info.checksum):
            raise WeightError(f"version {update_info.version} was not prepared, but {file.version}")
        loaded: Collection[str] = self.model.load_weights(iter(tensors.items()))
        if missing := sorted(self._parameters - set(loaded)):
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightError(f"version {file.version} has no weights for {', '.join(missing[:3])}{more}")

    def finish_weight_update(self) -> None:
        assert self._prepared is not None
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_heads()
        self.version, self._prepared, self.whole = self._prepared[0].version, None, True

    def _pack_heads(self) -> None:
        """On CPUs an output head multiplies with a packed copy of its weight. Where it is tied to the embedding it got
        no weights of its own, so vLLM does not pack it again: it would go on with the old ones."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and self.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._prepared = None
        self._beside.shutdown(wait=False, cancel_futures=True)
