"""From a simulated step to the memory of a rank: what is sharded, kept, recomputed, offloaded."""

from dataclasses import asdict, dataclass

from hf_striped.plan.simulate import KEEP_ATTENTION, NOTHING, RECOMPUTE, Simulation

DDP, FSDP = "DDP", "FSDP2"
OFFLOAD = "layers, inputs on the host"
TILE = 2048


@dataclass(frozen=True)
class Setup:
    """What a user chooses.

    Attributes:
        sharding: `"DDP"` (all of the model on every rank) or `"FSDP2"` (sharded over all ranks).
        checkpointing: what is recomputed in the backward pass.
        loss_tile_size: tokens whose logits live at once; None for all of the rank's.
    """

    sharding: str
    checkpointing: str
    loss_tile_size: int | None

    @property
    def name(self) -> str:
        tiles = "no tiles" if self.loss_tile_size is None else f"tiles of {self.loss_tile_size}"
        return f"{self.sharding}, recompute {self.checkpointing}, {tiles}"


# the fastest first: recomputing costs time, sharding costs messages, tiles cost one more product with the head
SETUPS = tuple(
    Setup(sharding, checkpointing, tile)
    for checkpointing in (NOTHING, KEEP_ATTENTION, RECOMPUTE, OFFLOAD)
    for sharding in (DDP, FSDP)
    for tile in (None, TILE)
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a training step, by what they are for.

    Attributes:
        parameters: fp32, this rank's shard.
        gradients: fp32, and under DDP the buckets that they travel in.
        optimizer: AdamW's two moments, fp32.
        gathered: under FSDP2 what is whole for the moment: root, two layers, and one layer's gradients.
        activations: what waits for the backward pass, and what is worked with at the peak, attention aside.
        attention: what attention works in, with the keys, values and gradients in flight.
        logits: of the loss, beyond what `activations` has at its own peak.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    attention: float
    logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def memory_of(
    simulation: Simulation, setup: Setup, tokens: float, ranks: int, bf16: bool
) -> Memory:
    """The memory of a rank that holds `tokens` tokens of a row, one of `ranks` in all."""
    whole = 4.0 * simulation.parameters
    sharded = setup.sharding == FSDP and ranks > 1
    shard = whole / ranks if sharded else whole
    buckets = whole if setup.sharding == DDP and ranks > 1 else 0.0
    gathered = 0.0
    if sharded:
        compute = 2 if bf16 else 4
        gathered = compute * (simulation.root_parameters + 2 * simulation.layer_parameters)
        gathered += 4 * simulation.layer_parameters
    way = RECOMPUTE if setup.checkpointing == OFFLOAD else setup.checkpointing
    layers = simulation.layers_pass[way]
    held, peak = layers.held.at(tokens), layers.peak.at(tokens)
    if sharded:  # what does not grow with the tokens is whole weights in bf16: these are `gathered`
        held, peak = held - layers.held.fixed, peak - layers.peak.fixed
    if setup.checkpointing == OFFLOAD:  # one layer's input is there, and the next arrives
        away = max(simulation.layers - 2, 0) * simulation.input_bytes * tokens
        held, peak = held - away, peak - away
    attention = simulation.ring * tokens
    of_loss = tokens if setup.loss_tile_size is None else min(tokens, setup.loss_tile_size)
    with_loss = held + simulation.head.peak.at(of_loss)
    with_loss -= simulation.head.peak.fixed if sharded else 0.0
    return Memory(
        parameters=shard,
        gradients=shard + buckets,
        optimizer=2 * shard,
        gathered=gathered,
        activations=peak,
        attention=attention,
        logits=max(0.0, with_loss - peak - attention),
    )


def longest(simulation: Simulation, setup: Setup, ranks: int, room: float, bf16: bool) -> int:
    """The most tokens a rank can hold within `room` bytes; 0 when not even the model fits."""
    low, high = 0, 1
    while memory_of(simulation, setup, high, ranks, bf16).total <= room and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if memory_of(simulation, setup, middle, ranks, bf16).total <= room:
            low = middle
        else:
            high = middle
    return low
