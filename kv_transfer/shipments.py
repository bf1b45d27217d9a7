"""What one iteration ships: for each handoff in the batch, its blocks in as many messages as suit its link.

Called on the engine's thread, as the layers are written. How many layers make a message is `sizing.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kv_transfer.handoff import BlockRange
from kv_transfer.sender import OutgoingHandoff
from kv_transfer.sizing import Chunk, layer_groups, message_layers
from tandem.types import BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shipment:
    handoff: OutgoingHandoff
    block_ids: tuple[BlockId, ...]
    by_last_layer: dict[int, BlockRange]


class Shipments:
    """Of one iteration over the `layers` of this rank. `layers_per_message` 0 leaves it to what was measured."""

    def __init__(self, *, layers: range, layers_per_message: int = 0) -> None:
        self._layers = layers
        self._layers_per_message = layers_per_message
        self._shipments: list[_Shipment] = []

    def add(
        self,
        handoff: OutgoingHandoff,
        chunk: Chunk,
        *,
        first_block: int,
        num_blocks: int,
        block_ids: tuple[BlockId, ...],
    ) -> None:
        """`num_blocks` blocks from `first_block` on will be complete in each layer; `block_ids` is the whole table."""
        whole = BlockRange(
            layer=self._layers.start, num_layers=len(self._layers), first_block=first_block, num_blocks=num_blocks
        )
        num_held = min(num_blocks, max(0, handoff.first_block - first_block))
        sent_bytes = chunk.layer_bytes * (num_blocks - num_held) // num_blocks
        sent = replace(chunk, layer_bytes=sent_bytes)
        size = message_layers(sent, handoff.speed, fixed=self._layers_per_message)
        handoff.ship(whole, block_ids, layers_per_message=size)
        self.add_sized(handoff, whole, block_ids, layers_per_message=size)

    def add_sized(
        self, handoff: OutgoingHandoff, whole: BlockRange, block_ids: tuple[BlockId, ...], *, layers_per_message: int
    ) -> None:
        """The same, of `whole`, where the number of layers in a message is known."""
        by_last_layer = {
            whole.layer + first + count - 1: replace(whole, layer=whole.layer + first, num_layers=count)
            for first, count in layer_groups(whole.num_layers, min(layers_per_message, whole.num_layers))
        }
        self._shipments.append(_Shipment(handoff=handoff, block_ids=block_ids, by_last_layer=by_last_layer))

    def written(self, layer: int) -> None:
        """The KV of a layer (the model's number) is in the cache: posts every message that it completes."""
        for shipment in self._shipments:
            blocks = shipment.by_last_layer.get(layer)
            if blocks is not None:
                shipment.handoff.post(blocks, shipment.block_ids)
